"""How much an operator makes of a small change of what it is given: each call run again with perturbed inputs.

The response of a result is the relative l2 distance of f(x′) from f(x), its condition the response over the relative l2 size of
the perturbation. What a rounding of the inputs does to a result is a floor for comparing two runs: `dump-compare --floor` reads
the file that is written here. It says nothing about whether an operator is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from trainprobe.comparison.files import write_json, writing
from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.op_check.cases import Case, NotChecked, Tensor, flat, mapped
from trainprobe.op_check.dump import selected
from trainprobe.op_check.execution import operator_of, run_on
from trainprobe.op_check.noise import UNIT
from trainprobe.op_check.plan import Kind
from trainprobe.op_check.properties import is_random
from trainprobe.op_check.recorded import RecordedRank, Unit

FORMAT = "trainprobe-condition"
KINDS: tuple[Kind, ...] = get_args(Kind)
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Conditioned:
    """One direction of one call. response: of each result, relative l2, of a backward the gradient of each argument.

    size: relative l2 of the perturbation, the largest of all arguments; 0 where nothing was perturbed. reason: why it was not
    run, empty where it was. device: where it ran.
    """

    step: int
    rank: int
    entry: str
    module: str
    response: Sequence[float] = ()
    size: float = 0.0
    reason: str = ""
    device: str = "cpu"

    @property
    def worst(self) -> float:
        """Return the largest response."""
        return max(self.response, default=0.0)

    @property
    def condition(self) -> float | None:
        """Return the largest response over the size of the perturbation, None without one."""
        return self.worst / self.size if self.size else None


def condition_rank(
    recorded: RecordedRank,
    units: Sequence[Unit],
    kind: Kind,
    at: tuple[int, int],
    device: str | None = "cpu",
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[Conditioned]:
    """Run each call of a step and rank with and without the perturbation. at: (step, rank).

    device: where the calls run, None for the device that they were recorded on.
    """
    found: list[Conditioned] = []
    equal: dict[str, Conditioned] = {}
    for i, unit in enumerate(units):
        advance(i, len(units))
        if unit.of_inputs:
            continue
        given = recorded.key(unit)[0] if recorded.has_tensors else ""
        known = equal.get(given) if given else None
        one = known or _conditioned(recorded, unit, kind, at, device)
        found.append(replace(one, entry=unit.entry, module=unit.module))
        equal.setdefault(given, one)
    advance(len(units), len(units))
    return found


def condition_dump(
    folders: Sequence[tuple[int, int, Path]],
    kind: Kind,
    names: Sequence[str] = (),
    device: str | None = "cpu",
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[Conditioned]:
    """Run all operator calls in these folders (step, rank, folder), with and without the perturbation."""
    found: list[Conditioned] = []
    for step, rank, folder in folders:
        recorded = RecordedRank.read(folder)
        units = [unit for unit in recorded.units() if selected(unit, names)]
        found += condition_rank(recorded, units, kind, (step, rank), device, advance)
    return found


def _conditioned(recorded: RecordedRank, unit: Unit, kind: Kind, at: tuple[int, int], device: str | None) -> Conditioned:
    where = device or next(recorded.devices(unit), "cpu")
    try:
        if is_random(unit.call.name):
            raise NotChecked("it draws random numbers")
        case = recorded.case(unit) if recorded.has_tensors else recorded.made_case(unit)
        response, size = condition(case, unit.direction == "backward", kind, where)
        return Conditioned(*at, unit.entry, unit.module, response, size, device=where)
    except NotChecked as why:
        reason = str(why)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError, KeyError) as error:
        reason = f"torch cannot run it on {where}: {(str(error).strip().splitlines() or [type(error).__name__])[0][:120]}"
    return Conditioned(*at, unit.entry, unit.module, reason=reason, device=where)


def condition(case: Case, backward: bool, kind: Kind, device: str = "cpu") -> tuple[list[float], float]:
    """Return the response of each result, and the size of the perturbation, both relative l2.

    Raises NotChecked where there is nothing to perturb, and what torch raises.
    """
    first = _run(case, backward, device)
    if kind == "nothing":
        return [_distance(a, b, exact=True) for a, b in _together(first, _run(case, backward, device))], 0.0
    other, size = _perturbed(case, kind)
    if not size:
        raise NotChecked("it is given no floating-point numbers that this changes")
    return [_distance(a, b) for a, b in _together(first, _run(other, backward, device))], size


def _together(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    yield from ((x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None)


def _run(case: Case, backward: bool, device: str) -> list[Tensor | None]:
    """Run the call, with the same random numbers each time; return its results, or the gradient of each tensor argument."""
    with without_dispatch(), _same_random_numbers(torch.device(device)):
        args, _, out = run_on(case, backward, operator_of(case), device)
    found = out if backward else flat(args[0] if out is None and args else out)
    return [None if t is None else t.detach().cpu() for t in found]


@contextmanager
def _same_random_numbers(device: torch.device) -> Generator[None]:
    """Seed the CPU and one device, and put their random states back afterwards; those of other devices are not touched."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            yield
        return
    with torch.random.fork_rng(devices=[device.index or 0], device_type=device.type):
        torch.default_generator.manual_seed(0)
        getattr(torch, device.type).manual_seed(0)  # of the current device alone
        yield


def _perturbed(case: Case, kind: Kind) -> tuple[Case, float]:
    """Return the call with other inputs, and how far they are away, relative l2."""
    sizes: list[float] = [0.0]

    def change(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not t.numel() or t.dtype not in UNIT:
            return t
        other = _changed(t.detach(), kind)
        sizes.append(UNIT[t.dtype] if kind == "precision" and other.dtype != t.dtype else _distance(t, other))
        return other

    args, kwargs = mapped((tuple(case.args), dict(case.kwargs)), change)
    gradients = None if case.gradients is None else [None if g is None else change(g) for g in case.gradients]
    finite = [size for size in sizes if math.isfinite(size)]
    return replace(case, args=args, kwargs=kwargs, gradients=gradients), max(finite)


def _changed(t: Tensor, kind: Kind) -> Tensor:
    if kind == "precision":
        return t.to(_WIDER.get(t.dtype, t.dtype))
    if kind == "swap":
        other = t.contiguous().clone().reshape(-1)
        other[[0, -1]] = other[[-1, 0]]
        return other.view(t.shape)
    fine = t.isfinite() & (t.abs() > torch.finfo(t.dtype).tiny)
    if kind == "last-bit":
        bits = t.contiguous().clone().view(_BITS[t.element_size()])
        return torch.where(fine, (bits ^ 1).view(t.dtype), t)
    signs = torch.randint(0, 2, t.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8) * 2 - 1
    return torch.where(fine, t + t * signs.to(t.dtype) * torch.finfo(t.dtype).eps, t)


def _distance(a: Tensor, b: Tensor, exact: bool = False) -> float:
    """Return the relative l2 distance of b from a; infinity where one of them alone is finite somewhere.

    exact: also of whole numbers; else these are at distance 0.
    """
    if a.shape != b.shape:
        return math.inf
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if not exact or torch.equal(a, b) else math.inf
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide).reshape(-1), b.to(wide).reshape(-1)
    same = (x == y) | (x.isnan() & y.isnan())
    if bool((~same & ~(x.isfinite() & y.isfinite())).any()):
        return math.inf
    apart_by = float(torch.where(same, 0.0, (y - x).abs()).norm())
    whole = float(torch.where(x.isfinite(), x.abs(), 0.0).norm())
    return apart_by / whole if whole else 0.0 if apart_by == 0 else math.inf


def write(found: Sequence[Conditioned], kind: Kind, path: Path) -> None:
    """Write the conditions of all calls, as `dump-compare --floor` reads them. Raises OutputError."""
    document = {"format": FORMAT, "version": 1, "perturbation": kind, "calls": [*map(record, found)]}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(document, path)


def record(one: Conditioned) -> dict[str, Any]:
    """Return a call as it stands in the file; numbers that JSON lacks are null."""
    number: Callable[[float | None], float | None] = lambda x: x if x is not None and math.isfinite(x) else None  # noqa: E731
    return {
        **{"step": one.step, "rank": one.rank, "entry": one.entry, "module": one.module, "device": one.device},
        **{"response": [*map(number, one.response)], "perturbed_by": one.size, "condition": number(one.condition)},
        **({"not_run": one.reason} if one.reason else {}),
    }


def sentences(found: Sequence[Conditioned], kind: Kind, most: int = 12) -> list[str]:
    """Return what to print: how many calls ran, and those that respond most, largest first."""
    ran = [one for one in found if not one.reason]
    head = f"{len(ran)} of {len(found)} calls run again"
    if kind == "nothing":
        other = [one for one in ran if one.worst > 0]
        lines = [f"{head} with the same inputs: {f'{len(other)} gave other bits' if other else 'all gave the same bits'}"]
        return lines + [
            f"  {one.entry}{_in(one)} is not deterministic: other bits, {one.worst:.1e} away" for one in other[:most]
        ]
    by_size = sorted(ran, key=lambda one: -(one.condition or 0.0))
    largest = f"; {by_size[0].entry}{_in(by_size[0])} responds most" if by_size else ""
    lines = [f"{head} with perturbed inputs ({kind}){largest}"]
    return lines + [
        f"  {one.entry}{_in(one)}: condition {one.condition or 0.0:.3g} (changes by {one.worst:.1e} for {one.size:.1e})"
        for one in by_size[:most]
    ]


def _in(one: Conditioned) -> str:
    return f" in {one.module}" if one.module else ""
