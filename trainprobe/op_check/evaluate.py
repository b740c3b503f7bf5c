"""What a call should have given: its float64 result, and the noise of a correct kernel around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from trainprobe.engine.arrays.torch_apart import apart
from trainprobe.op_check.cases import Case, NotChecked, Tensor, flat, mapped
from trainprobe.op_check.functions import api, function, is_in_place
from trainprobe.op_check.noise import UNIT, Noise
from trainprobe.op_check.references import formulas

EVALUATIONS, OF_LARGE, LARGE = (
    8,
    4,
    1 << 17,
)  # with noise: enough that no element stays still in all; of tensors beyond LARGE elements
SINGLE = 2.0**-24  # what kernels calculate in, for all formats up to float32
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Expected:
    """One result as it should be. value: float64, or whole numbers. noise: float64 ≥ 0, None where nothing is rounded."""

    value: Tensor
    noise: Tensor | None


@dataclass(frozen=True, slots=True)
class Expectation:
    """All results of a call, flat. source: "formula", or "float64 kernel" of torch. autocast: inputs were rounded first."""

    results: Sequence[Expected | None]
    source: str
    autocast: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """How a kernel rounds. accumulate: u of what it calculates in; matrices: of the inputs of its products of matrices.

    walk: a sum's error is that of a random walk, which is smaller than what can be promised, for telling modes from bugs.
    change: what it does to its floating inputs first.
    """

    accumulate: float = SINGLE
    matrices: float = 0.0
    walk: bool = False
    change: Change | None = None


def expect(case: Case, *, backward: bool = False, steps: Steps | None = None) -> Expectation:
    """Return what the call's outputs, or with `backward` what its gradients should be.

    steps: how a kernel rounds, float32 by default. Raises NotChecked where there is no reference.
    """
    steps = steps or Steps()
    recorded = case.results if backward else case.outputs
    low = autocast(case)
    rounded = _to(low) if low is not None else None
    changes = [c for c in (rounded, steps.change) if c is not None]
    run = _Run(case, backward, changes)
    source, base = run.first()
    unit = max((UNIT.get(t.dtype, 0.0) for t in recorded if t is not None), default=0.0)
    noises = _noises(run, source, base, unit, steps)
    results = [None if r is None else Expected(r, n) for r, n in zip(base, noises, strict=True)]
    return Expectation(results, source, low)


def autocast(case: Case) -> torch.dtype | None:
    """Return the 16-bit format that inputs were cast to before the call, None where the output's format needs no such story."""
    out = next((t.dtype for t in case.outputs if t is not None and t.dtype.is_floating_point), None)
    if out not in (torch.float16, torch.bfloat16) or _names_a_dtype(case) or api(case.name) in _CASTS:
        return None
    given = [t.dtype for t in case.tensors() if t.dtype.is_floating_point and t.ndim]
    return out if any(d not in (out, torch.float64) and UNIT.get(d, 1.0) < UNIT[out] for d in given) else None


_CASTS = {"to", "type_as", "type", "half", "bfloat16", "copy", "setitem", "_to_copy", "index_put", "fill", "masked_fill"}


def _names_a_dtype(case: Case) -> bool:
    found: list[bool] = []
    mapped((case.args, dict(case.kwargs)), lambda t: t, lambda leaf: found.append(isinstance(leaf, torch.dtype)))
    return any(found) or is_in_place(case.name) or "out" in case.kwargs


def _to(dtype: torch.dtype) -> Change:
    return lambda t: t.to(dtype).to(torch.float64)


class _Run:
    """Evaluates one call in float64, again and again."""

    def __init__(self, case: Case, backward: bool, changes: Sequence[Change]) -> None:
        self.case = case
        self.backward = backward
        self.changes = changes
        self.edges: list[int | None] | None = None  # recorded gradient → which tensor argument it is of
        self.source = ""
        self.node = ""

    def first(self) -> tuple[str, list[Tensor | None]]:
        """Return the source and the results without noise."""
        if self.backward and not self.case.of_inputs:
            self.edges = self._edges() if self._known() is not None else self._edges_in_order()
        if self._formula() is not None and (not self.backward or self.case.of_inputs or self.edges is not None):
            self.source = "formula"
            with suppress(NotImplementedError, TypeError, RuntimeError, IndexError, StopIteration, KeyError):
                return self.source, self.once(None)
            # the formula does not cover these arguments: torch's own kernel in float64 does
        self.source = "float64 kernel"
        return self.source, self.once(None)

    def once(self, noise: Noise | None, move_inputs: bool = False) -> list[Tensor | None]:
        """Evaluate the call. noise: moves its steps. move_inputs: let it move the inputs by their rounding too."""
        with apart(), torch.random.fork_rng(devices=[]):
            if noise is None:
                before = torch.get_rng_state()
                results = self._evaluated(None, False)
                if not torch.equal(before, torch.get_rng_state()):
                    raise NotChecked("it draws random numbers, and the dump does not hold which")
                return results
            with noise:
                return self._evaluated(noise, move_inputs)

    def _evaluated(self, noise: Noise | None, move_inputs: bool) -> list[Tensor | None]:
        case = self.case
        leaves: list[Tensor] = []
        wanted = list(case.requires_grad)

        def prepared(t: Tensor) -> Tensor:
            t = self._widened(t, noise if move_inputs else None)
            if not self.backward or not t.is_floating_point():
                leaves.append(t)
                return t.clone()
            place = len(leaves)
            leaf = t.clone().requires_grad_(place >= len(wanted) or wanted[place])
            leaves.append(leaf)
            return leaf.clone() if leaf.requires_grad else leaf

        with torch.set_grad_enabled(self.backward):
            args, kwargs = mapped((tuple(case.args), dict(case.kwargs)), prepared, _wide_dtype)
            call = self._callable()
            out = list(flat(call(*args, **kwargs)))
            if not self.backward:
                return list(out)
            return [None if g is None else g.detach() for g in self._gradients(out, leaves, noise if move_inputs else None)]

    def _widened(self, t: Tensor, noise: Noise | None) -> Tensor:
        if not t.is_floating_point():
            return t.to(torch.complex128) if t.is_complex() else t
        wide = t.detach().to(torch.float64)
        for change in self.changes:
            wide = change(wide)
        if noise is not None:
            wide = wide * (1 + SINGLE * noise.signs(wide)) if noise.accumulate else wide
        return wide

    def _gradients(self, out: Sequence[Tensor], leaves: Sequence[Tensor], noise: Noise | None) -> list[Tensor | None]:
        given = [None if g is None else self._widened(g, noise) for g in self.case.gradients or ()]
        if self.case.of_inputs or self.source == "formula":
            return self._of_leaves(out, leaves, given)
        if self.node.startswith(
            "ToCopy"
        ):  # the last thing that a composite did was to cast its result: it hands on what it gets
            return given
        node = _node(out)
        if node.name() != self.node:
            if self.edges is not None:
                return self._of_leaves(out, leaves, given)
            raise NotChecked(f"its gradient is recorded at an inner step ({self.node}), which it has in this format alone")
        slots = len(node._input_metadata)  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():  # else kernels of first derivatives make way for what can be differentiated twice
            results: Any = node(*[*given, *[None] * slots][: max(1, slots)])
        return [*results] if isinstance(results, tuple) else [results]

    def _of_leaves(
        self, out: Sequence[Tensor], leaves: Sequence[Tensor], given: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        able = [o for o in out if o.requires_grad]
        pairs = [(o, g) for o, g in zip(able, given, strict=False) if g is not None]
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad([o for o, _ in pairs], asked, [g.reshape(o.shape) for o, g in pairs], allow_unused=True)
        by_leaf = {id(leaf): g for leaf, g in zip(asked, found, strict=True)}
        each = [by_leaf.get(id(leaf)) for leaf in leaves]
        return each if self.edges is None else [None if e is None else each[e] for e in self.edges]

    def _callable(self) -> Callable[..., Any]:
        known = self._formula() if self.source == "formula" else None
        return known or self._torch_function()

    def _torch_function(self) -> Callable[..., Any]:
        found = self._known()
        if found is None:
            raise NotChecked(f"there is no {self.case.name} in this installation of torch {torch.__version__}")
        return _without_memory(found)

    def _known(self) -> Callable[..., Any] | None:
        return self.case.function or function(self.case.name)

    def _edges_in_order(self) -> list[int | None]:
        """Return the edges of an operator that only another device has: its gradients are those of its tensors, in order."""
        given = self.case.tensors()
        for g, t in zip(self.case.results, given, strict=False):
            if g is not None and g.shape != t.shape:
                raise NotChecked(f"which argument each gradient of {self.case.name} is of cannot be told without its library")
        return [i if g is not None else None for i, g in enumerate(self.case.results[: len(given)])]

    def _formula(self) -> Callable[..., Any] | None:
        known = formulas().get(api(self.case.name))
        if known is None:
            return None
        try:
            inspect.signature(known).bind(*self.case.args, **self.case.kwargs)
        except TypeError:
            return None
        return known

    def _edges(self) -> list[int | None] | None:
        """Return which tensor argument each gradient of the dump belongs to, by the graph that torch makes of this call here.

        None where the call is made of several nodes, so that the dump holds what passes between them.
        """
        leaves = 0
        entries: dict[Any, int] = {}
        wanted = list(self.case.requires_grad)
        low = autocast(self.case)

        def prepared(t: Tensor) -> Tensor:
            nonlocal leaves
            t = t.detach()
            place = leaves
            leaves += 1
            if not t.is_floating_point() or not (place >= len(wanted) or wanted[place]):
                return t.to(low) if low is not None and t.dtype == torch.float32 else t.clone()
            entered = t.to(low or t.dtype).clone().requires_grad_().clone()
            entries[entered.grad_fn] = place
            return entered

        with apart(), torch.enable_grad():
            args, kwargs = mapped((tuple(self.case.args), dict(self.case.kwargs)), prepared, _on_host)
            node = _node([*flat(self._torch_function()(*args, **kwargs))])
        self.node = node.name()
        edges = [next_node for next_node, _ in node.next_functions]
        if any(e is not None and e not in entries for e in edges):
            return None
        return [None if e is None else entries[e] for e in edges]


def _node(out: Sequence[Tensor]) -> Any:
    node = next((o.grad_fn for o in out if o.grad_fn is not None), None)
    if node is None:
        raise NotChecked("nothing of this call requires a gradient here")
    return node


def _without_memory(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without `out=` and devices: it runs on the host, into memory of its own."""

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("out", None)
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        result = call(*args, **kwargs)
        return args[0] if result is None and args else result

    return called


def _wide_dtype(leaf: Any) -> Any:
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else _on_host(leaf)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, str) and leaf.partition(":")[0] in {"cuda", "npu", "mps", "xpu", "musa", "hpu"}:
        return "cpu"
    return leaf


def _noises(run: _Run, source: str, base: Sequence[Tensor | None], unit: float, steps: Steps) -> list[Tensor | None]:
    """Return how far each element moves when the steps are rounded; None where no step rounds."""
    formula = source == "formula"
    accumulate = unit if unit == UNIT[torch.float64] else steps.accumulate
    spread: list[Tensor | None] = [None] * len(base)
    size = max((r.numel() for r in base if r is not None), default=0)
    for seed in range(EVALUATIONS if size <= LARGE else OF_LARGE):

        def noise(seed: int = seed) -> Noise:
            noise = Noise(seed, accumulate, max(unit, accumulate), backward=run.backward, kernel=not formula)
            noise.matrices, noise.walk = steps.matrices, steps.walk
            if unit == UNIT[torch.float16]:
                noise.largest = torch.finfo(torch.float16).max
            return noise

        mode = noise()
        moved = run.once(mode)
        if mode.rounded == 0:
            return [None] * len(base)
        _widen(spread, base, moved)
        if not formula:
            _widen(spread, base, run.once(noise(seed + 100), True))
        elif mode.rounded == 1:
            break
    return spread


def _widen(spread: list[Tensor | None], base: Sequence[Tensor | None], moved: Sequence[Tensor | None]) -> None:
    for i, (r, m) in enumerate(zip(base, moved, strict=True)):
        if r is None or m is None or not r.is_floating_point():
            continue
        apart_by = torch.where(r == m, torch.zeros_like(r), (m - r).abs())
        apart_by = torch.where(r.isnan() & m.isnan(), torch.zeros_like(r), apart_by)
        apart_by = torch.where(apart_by.isnan(), torch.full_like(r, float("inf")), apart_by)
        known = spread[i]
        spread[i] = apart_by if known is None else torch.maximum(known, apart_by)
