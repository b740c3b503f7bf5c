"""The file of one call beside its replay script, read again: the classic three lines for a failure that was saved.

    import torch, trainprobe
    right, args, kwargs, out = trainprobe.compare_for_single_op("op_check/Functional_gelu_0_forward.safetensors", device="npu")

The file is a safetensors file; its metadata hold the call as JSON. No pickle is read.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainprobe.engine.storage.safe_files import regular
from trainprobe.errors import FormatError, UsageError
from trainprobe.op_check.cases import Case, NotChecked, Tensor, flat
from trainprobe.op_check.check import check
from trainprobe.op_check.execution import run_on
from trainprobe.op_check.functions import function
from trainprobe.op_check.judge import Tolerance

CALL = "trainprobe.call"  # key of the metadata
_CLASSIC_TOLERANCE = 1e-3  # for the one of atol and rtol that is left out
Saved = tuple[bool, tuple[Any, ...], dict[str, Any], Any]


def compare_for_single_op(
    path: str | Path,
    op: Callable[..., Any] | str | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    *,
    device: str = "cpu",
) -> Saved:
    """Run a saved call again on a device and judge it; return (is it right, args, kwargs, what came out).

    path: the safetensors file that `dump_error_data` or `--replay` left. op: what to run, a function or a name such as
    `torch.ops.aten.addmm`; None runs the operator that was saved. atol, rtol: judge by |y − r| ≤ atol + rtol·|r| instead of
    the calibrated bound; the one that is left out is 1e-3. Of a saved backward the gradients of the tensor arguments come
    out. `not checked` is not right. Prints one line. Raises FormatError where the file holds no call, UsageError for a
    pickle or an operator that is not there.
    """
    case, backward = read_saved(Path(path))
    args, kwargs, out = run_on(case, backward, _callable(op, case), device)
    got = [None if t is None else t.detach().cpu() for t in (out if backward else flat(out))]
    case = replace(case, results=got, of_inputs=True) if backward else replace(case, outputs=got)
    limits = (_CLASSIC_TOLERANCE if limit is None else limit for limit in (atol, rtol))
    worst = check(case, backward, None if atol is None and rtol is None else Tolerance(*limits)).worst
    right = worst.outcome not in ("bug", "suspicious", "not checked")
    said = f"{case.name} on {device} succeeds" if right else f"[ERROR] {case.name} on {device} fails"
    _say(f"{said}: {worst.outcome} {worst.reason}")
    return right, args, kwargs, out


def nan_inf_track_for_single_op(path: str | Path, op: Callable[..., Any] | str | None = None, *, device: str = "cpu") -> Saved:
    """Run a saved call again and look for NaN and infinities; return (is all finite, args, kwargs, what came out).

    Arguments and errors as for `compare_for_single_op`.
    """
    case, backward = read_saved(Path(path))
    args, kwargs, out = run_on(case, backward, _callable(op, case), device)
    found = [t for t in flat(out) if t.is_floating_point() or t.is_complex()]
    odd = sum(int((~torch.isfinite(t)).sum()) for t in found)
    of = sum(t.numel() for t in found)
    _say(f"{'[WARNING] ' if odd else ''}{case.name} on {device}: {odd} of {of} elements are NaN or infinite")
    return odd == 0, args, kwargs, out


def described(case: Case, backward: bool) -> str:
    """Return a call without its tensors as JSON. Raises NotChecked for an argument that has no text."""
    args, kwargs = _packed((tuple(case.args), dict(case.kwargs)), iter(range(len(case.tensors()))))["tuple"]
    wanted = [bool(needed) for needed in case.requires_grad]
    return json.dumps({"name": case.name, "args": args, "kwargs": kwargs, "backward": backward, "requires_grad": wanted})


def read_saved(path: Path) -> tuple[Case, bool]:
    """Return a saved call and whether it is a backward. Raises FormatError, and UsageError for a pickle."""
    if path.suffix in (".pkl", ".pickle"):
        text = f"{path} is a pickle, which can run code as it is read: record the failure again with trainprobe.CompareWithCPU"
        raise UsageError(f"{text}(dump_error_data=True), which leaves a safetensors file")
    try:
        with safe_open(regular(path), "pt") as file:
            text = (file.metadata() or {}).get(CALL)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    except (OSError, SafetensorError) as error:
        raise FormatError(f"{path} cannot be read as a safetensors file: {error}") from None
    if text is None:
        raise FormatError(f"{path} holds no call: `op-check DUMP --op NAME --replay DIR` and dump_error_data write such files")
    try:
        call = json.loads(text)
        args, kwargs = (_unpacked(call[key], tensors) for key in ("args", "kwargs"))
        backward = bool(call["backward"])
        gradients = _numbered(tensors, "gradient.") if backward else None
        wanted = [bool(needed) for needed in call["requires_grad"]]
        return Case(str(call["name"]), args, kwargs, (), gradients, (), wanted), backward
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} holds a call that cannot be read: {type(error).__name__}: {error}") from None


def _numbered(tensors: dict[str, Tensor], prefix: str) -> list[Tensor | None]:
    places = [int(name.removeprefix(prefix)) for name in tensors if name.startswith(prefix)]
    return [tensors.get(f"{prefix}{i}") for i in range(max(places, default=-1) + 1)]


def _packed(tree: Any, count: Any) -> Any:
    if isinstance(tree, Tensor):
        return {"tensor": next(count)}
    if isinstance(tree, (list, tuple)):
        return {"list" if isinstance(tree, list) else "tuple": [_packed(item, count) for item in tree]}
    if isinstance(tree, dict):
        return {"dict": {str(key): _packed(item, count) for key, item in tree.items()}}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"float": str(tree)}
    if isinstance(tree, complex):
        return {"complex": [str(tree.real), str(tree.imag)]}
    if isinstance(tree, slice):
        return {"slice": [_packed(bound, count) for bound in (tree.start, tree.stop, tree.step)]}
    if isinstance(tree, (torch.dtype, torch.memory_format, torch.layout)):
        return {"torch": str(tree).removeprefix("torch.")}
    if tree is Ellipsis:
        return {"ellipsis": True}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise NotChecked(f"an argument of type {type(tree).__name__} cannot be saved")


def _unpacked(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, held),) = tree.items()
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_unpacked(item, tensors) for item in held)
    if kind == "dict":
        return {key: _unpacked(item, tensors) for key, item in held.items()}
    if kind == "slice":
        return slice(*(_unpacked(bound, tensors) for bound in held))
    return _LEAVES[kind](held, tensors)


def _of_torch(name: str, _: Any) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
        raise ValueError(f"torch.{name} is no format")
    return found


_LEAVES: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "tensor": lambda i, tensors: tensors[f"input.{int(i)}"],
    "float": lambda text, _: float(text),
    "complex": lambda parts, _: complex(float(parts[0]), float(parts[1])),
    "torch": _of_torch,
    "ellipsis": lambda *_: Ellipsis,
}


def _callable(op: Callable[..., Any] | str | None, case: Case) -> Callable[..., Any]:
    if callable(op):
        return op
    name = case.name if op is None else op
    for prefix, ours in (("torch.ops.aten.", "Aten."), ("torch.nn.functional.", "Functional."), ("torch.ops.", "")):
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
    name = f"Torch.{name.removeprefix('torch.')}" if name.startswith("torch.") else name
    found = function(name)
    if found is None:
        raise UsageError(f"there is no operator {name} in this installation of torch {torch.__version__}: hand over a function")
    return found


def _say(text: str) -> None:
    sys.stdout.write(f"{text.rstrip()}\n")
