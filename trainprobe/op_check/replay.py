"""One judged call as a safetensors file and a script that needs torch alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainprobe.errors import OutputError, UsageError
from trainprobe.op_check.cases import Case, NotChecked, Tensor, mapped
from trainprobe.op_check.check import check
from trainprobe.op_check.dump import Row
from trainprobe.op_check.made import run_here
from trainprobe.op_check.recorded import RecordedRank, Unit

_OWNERS = {
    "Torch": ("torch", "torch.linalg", "torch.fft", "torch.special"),
    "Functional": ("torch.nn.functional", "torch._C._nn"),
}


def write_replay(row: Row, folder: Path, recorded: RecordedRank | None = None) -> Path:
    """Write the call of a row; return the script. recorded: its step, where that is no dump on disk.

    Raises OutputError, and UsageError where the dump does not hold the call.
    """
    recorded = recorded or (None if row.folder is None else RecordedRank.read(row.folder))
    if row.unit is None or recorded is None:
        raise UsageError(f"{row.entry} cannot be written: its dump is not at hand")
    backward = row.unit.direction == "backward"
    try:
        case = _case(recorded, row.unit, backward)
    except NotChecked as why:
        raise UsageError(f"{row.entry} cannot be replayed: {why}") from None
    name = "".join(c if c.isalnum() else "_" for c in row.entry)
    script, inputs = folder / f"{name}.py", folder / f"{name}.safetensors"
    wanted = [*case.requires_grad] or [True] * len(case.tensors())
    text = _template().format(
        title=row.entry,
        script=script.name,
        inputs=inputs.name,
        expression=_expression(case),
        backward=backward,
        of_inputs=case.of_inputs,
        requires_grad=wanted,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_tensors(case, backward), inputs)
        script.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error}") from error
    return script


def _case(recorded: RecordedRank, unit: Unit, backward: bool) -> Case:
    return recorded.case(unit) if recorded.has_tensors else run_here(recorded.made_case(unit), backward)


def _template() -> str:
    return Path(__file__).with_name("replay_script.txt").read_text(encoding="utf-8")


def _tensors(case: Case, backward: bool) -> dict[str, Tensor]:
    """Return what the script needs, each in memory of its own."""
    found: dict[str, Tensor | None] = {f"input.{i}": t for i, t in enumerate(case.tensors())}
    found |= {f"gradient.{i}": t for i, t in enumerate(case.gradients or ())}
    found |= {f"recorded.{i}": t for i, t in enumerate(case.results if backward else case.outputs)}
    expectation = check(case, backward).expectation
    for i, expected in enumerate(expectation.results if expectation is not None else ()):
        if expected is not None:
            found |= {f"expected.{i}": expected.value, f"noise.{i}": expected.noise}
    return {name: t.detach().contiguous().clone() for name, t in found.items() if t is not None and not t.is_complex()}


def _expression(case: Case) -> str:
    """Return the call as Python."""
    count = iter(range(len(case.tensors())))
    args, kwargs = mapped((tuple(case.args), dict(case.kwargs)), lambda t: _Shown(f"t({next(count)})"), _shown)
    prefix, _, name = case.name.partition(".")
    given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items() if key not in ("device", "out"))]
    if prefix == "Tensor":
        return f"torch.Tensor.{name}({', '.join(given)})"
    for owner in _OWNERS.get(prefix, ()):
        if hasattr(_place(owner), name):
            return f"{owner}.{name}({', '.join(given)})"
    namespace = {"Aten": "aten", "Prims": "prims", "NPU": "npu"}.get(prefix, prefix)
    return f"torch.ops.{namespace}.{name}({', '.join(given)})"


def _place(owner: str) -> Any:
    found: Any = torch
    for part in owner.split(".")[1:]:
        found = getattr(found, part)
    return found


class _Shown(str):
    """Text that stands in Python code as it is."""

    def __repr__(self) -> str:
        return str(self)


def _shown(leaf: Any) -> Any:
    if isinstance(leaf, float):
        return _Shown(repr(leaf)) if leaf == leaf and abs(leaf) != float("inf") else _Shown(f"float({str(leaf)!r})")
    return leaf if not isinstance(leaf, Mapping) else dict(leaf)
