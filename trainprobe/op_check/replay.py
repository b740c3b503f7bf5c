"""One judged call as a safetensors file and a script that needs torch alone."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import save_file

from trainprobe.comparison.files import writing
from trainprobe.errors import UsageError
from trainprobe.op_check.cases import Case, NotChecked, Tensor
from trainprobe.op_check.check import check
from trainprobe.op_check.dump import Row
from trainprobe.op_check.evaluate import Expectation
from trainprobe.op_check.execution import run_here
from trainprobe.op_check.expression import expression
from trainprobe.op_check.recorded import RecordedRank, Unit
from trainprobe.op_check.saved_calls import CALL, described

_LONGEST = 120  # characters of a file's name


def write_replay(row: Row, folder: Path, recorded: RecordedRank | None = None) -> Path:
    """Write the call of a row; return the script. recorded: its step, where that is no dump on disk.

    Raises OutputError, and UsageError where the dump does not hold the call.
    """
    recorded = recorded or (None if row.folder is None else RecordedRank.read(row.folder))
    unit = row.unit or next((u for u in recorded.units() if u.entry == row.entry), None) if recorded is not None else None
    if unit is None or recorded is None:
        raise UsageError(f"{row.entry} cannot be written: its dump is not at hand")
    backward = unit.direction == "backward"
    try:
        case = _case(recorded, unit, backward)
        code, call = expression(case), described(case, backward)
    except NotChecked as why:
        raise UsageError(f"{row.entry} cannot be replayed: {why}") from None
    name = re.sub(r"[^A-Za-z0-9]", "_", row.entry)[:_LONGEST]
    script, inputs = folder / f"{name}.py", folder / f"{name}.safetensors"
    wanted = [bool(needed) for needed in case.requires_grad] or [True] * len(case.tensors())
    expectation = check(case, backward, whole=True).expectation
    text = _template().format(
        title=re.sub(r"[^A-Za-z0-9_.]", "?", row.entry),
        script=script.name,
        inputs=inputs.name,
        expression=code,
        backward=backward,
        of_inputs=bool(case.of_inputs),
        requires_grad=wanted,
        source=next((each.source for each in expectation.results if each), "") if expectation is not None else "",
    )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_tensors(case, backward, expectation), inputs, {CALL: call})
        script.write_text(text, encoding="utf-8")
    return script


def _case(recorded: RecordedRank, unit: Unit, backward: bool) -> Case:
    return recorded.case(unit) if recorded.has_tensors else run_here(recorded.made_case(unit), backward)


def _template() -> str:
    return Path(__file__).with_name("replay_script.txt").read_text(encoding="utf-8")


def _tensors(case: Case, backward: bool, expectation: Expectation | None) -> dict[str, Tensor]:
    """Return what the script needs, each in memory of its own."""
    found: dict[str, Tensor | None] = {f"input.{i}": t for i, t in enumerate(case.tensors())}
    found |= {f"gradient.{i}": t for i, t in enumerate(case.gradients or ())}
    found |= {f"recorded.{i}": t for i, t in enumerate(case.results if backward else case.outputs)}
    for i, expected in enumerate(expectation.results if expectation is not None else ()):
        if expected is not None:
            found |= {f"expected.{i}": expected.value, f"noise.{i}": expected.noise}
    return {name: t.detach().contiguous().clone() for name, t in found.items() if t is not None and not t.is_complex()}
