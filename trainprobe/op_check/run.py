"""One call, evaluated in float64: its results, or the gradients that it hands on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.op_check.autocast import autocast
from trainprobe.op_check.cases import Case, NotChecked, Tensor, flat, mapped
from trainprobe.op_check.execution import operator_of
from trainprobe.op_check.functions import api, function, is_in_place
from trainprobe.op_check.noise import UNIT, Noise
from trainprobe.op_check.references import Formula, Sum, formulas
from trainprobe.op_check.references.matrices import by_norms

SINGLE = 2.0**-24  # what kernels calculate in, for all formats up to float32
Size = tuple[Tensor, float]  # how far a kernel may be off, in multiples of the second
_NONE = torch.zeros(())


_EDGES: dict[Any, tuple[list[int | None] | None, str]] = {}
_MOST_EDGES = 4096
_ALGORITHMS = {"pinverse", "inverse", "cholesky", "cholesky_inverse", "cholesky_solve", "triangular_solve", "logdet", "det"}
_RESHAPES = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}


class Run:
    """Evaluates one call in float64, again and again. low: the format that its inputs are rounded to first."""

    def __init__(self, case: Case, backward: bool, low: torch.dtype | None = None) -> None:
        self.case = case
        self.backward = backward
        self.low = low
        self.edges: list[int | None] | None = None  # recorded gradient → which tensor argument it is of
        self.source = ""
        self.node = ""
        self.rounded = 0  # steps that round

    def first(self) -> tuple[str, list[Tensor | None]]:
        """Return the source and the results without noise."""
        if self.backward and not self.case.of_inputs:
            self.edges = self._known_edges() if self._known() is not None else self._edges_in_order()
            moved = self._reshaped()
            if moved is not None:
                return "float64 kernel", [moved]
        if self._has_formula() and (not self.backward or self.case.of_inputs or self.edges is not None):
            self.source = "formula"
            with suppress(NotImplementedError, TypeError, RuntimeError, IndexError, StopIteration, KeyError):
                return self.source, self.once(None)
            # the formula does not cover these arguments: torch's own kernel in float64 does
        self.source = "float64 kernel"
        return self.source, self.once(None)

    def _reshaped(self) -> Tensor | None:
        """Return the gradient of a call that ends in a view, as `linear` in three dimensions does: it stays as it is."""
        given, results = self.case.gradients or (), self.case.results
        if self.edges is not None or self.node not in _RESHAPES or len(given) != 1 or len(results) != 1:
            return None
        g, result = given[0], results[0]
        if g is None or result is None or g.numel() != result.numel():
            return None
        return self._widened(g, None).reshape(result.shape)

    def once(self, noise: Noise | None, move_inputs: bool = False) -> list[Tensor | None]:
        """Evaluate the call. noise: moves its steps. move_inputs: let it move the inputs by their rounding too."""
        with without_dispatch(), torch.random.fork_rng(devices=[]):
            if noise is not None:
                with noise:
                    return self._evaluated(noise, move_inputs)
            before = torch.get_rng_state()
            with Noise(0, SINGLE, SINGLE, backward=self.backward, kernel=self.source != "formula", still=True) as still:
                results = self._evaluated(None, False)
            if not torch.equal(before, torch.get_rng_state()):
                raise NotChecked("it draws random numbers, and the dump does not hold which")
            self.rounded = still.rounded
            return results

    def known_rounding(self, accumulate: float) -> list[Size] | None:
        """Return how far a kernel may be off where its formula tells; None where that has to be tried."""
        formula = self._used_formula()
        known = formula.rounding if formula is not None and not self.backward else None
        if known is None or any(t.is_complex() for t in self.case.tensors()):
            return None
        with without_dispatch():
            args, kwargs = self._given_for_sizes(accumulate)
            sizes = known(*args, **kwargs)
        return _finite([(size, accumulate) for size in flat(sizes)])

    def _given_for_sizes(self, accumulate: float, *more: Tensor | None) -> Any:
        """Return the arguments, and more of their kind, as sizes are worked out of them."""
        wide = _format_of_sizes(accumulate)

        def given(t: Tensor) -> Tensor:
            return t.detach() if t.dtype == wide and self.low is None else self._widened(t, None).to(wide)

        def one(t: Tensor) -> Tensor:
            return given(t) if t.is_floating_point() else t

        tree = mapped((tuple(self.case.args), dict(self.case.kwargs)), one, _wide_dtype)
        return (*tree, *(None if t is None else one(t) for t in more))

    def _of_gradients(self, accumulate: float) -> list[Size] | None:
        """Return how far each gradient is off at least, where the formula tells; None where that has to be tried."""
        formula = self._used_formula()
        known = formula.gradients if formula is not None and self.backward else None
        given = self.case.gradients or ()
        if known is None or len(given) != 1 or given[0] is None or any(t.is_complex() for t in self.case.tensors()):
            return None
        with without_dispatch():
            args, kwargs, g = self._given_for_sizes(accumulate, given[0])
            sizes: Mapping[str, Tensor] | None = known(g, *args, **kwargs)
        if sizes is None:
            return None
        names = [name for name, _ in named_tensors(self.case)]
        edges = range(len(names)) if self.edges is None else self.edges
        return _finite([(_NONE, 0.0) if e is None or names[e] not in sizes else (sizes[names[e]], accumulate) for e in edges])

    def rounding_by_norms(self, accumulate: float) -> list[Size] | None:
        """Return u‖a‖‖b‖ for each element of a product of matrices, from the norms of rows and columns.

        Of other operators what their formula tells of gradients, None where it tells nothing.
        """
        formula = self._used_formula()
        known = formula.adds if formula is not None else None
        if known is None:
            return self._of_gradients(accumulate)
        if any(t.is_complex() for t in self.case.tensors()):
            return None
        with without_dispatch(), Noise(0, SINGLE, SINGLE, backward=self.backward, still=True), by_norms():
            sizes = self._evaluated(None, False, _format_of_sizes(accumulate))
        return _finite([(_NONE if s is None else s, accumulate) for s in sizes])

    def rounding_of_sums(self, accumulate: float) -> list[Size] | None:
        """Return the rounding of a sum of K products, u·√K·Σ|products|, for each result; None for any other operator."""
        formula = self._used_formula()
        known = formula.adds if formula is not None else None
        if known is None or any(t.is_complex() for t in self.case.tensors()):
            return None
        length = known.length(*self.case.args, **self.case.kwargs)
        with without_dispatch(), Noise(0, SINGLE, SINGLE, backward=self.backward, still=True):
            sizes = self._evaluated(None, False, _format_of_sizes(accumulate))
        if not self.backward:
            return _finite([(s, accumulate * math.sqrt(length)) for s in sizes if s is not None])
        lengths = self._lengths(known, length)
        edges = range(len(sizes)) if self.edges is None else self.edges
        pairs = zip(sizes, edges, strict=True)
        return _finite([(_NONE, 0.0) if s is None or e is None else (s, accumulate * math.sqrt(lengths[e])) for s, e in pairs])

    def _lengths(self, known: Sum, length: int) -> list[int]:
        """Return how many terms the gradient of each tensor argument adds up."""
        out = sum(g.numel() for g in self.case.gradients or () if g is not None)
        return [
            max(1, out * (1 if name in known.addends else length) // max(1, t.numel())) for name, t in named_tensors(self.case)
        ]

    def _evaluated(self, noise: Noise | None, move_inputs: bool, sizes: torch.dtype | None = None) -> list[Tensor | None]:
        """Evaluate the call. sizes: with the sizes of all numbers alone, in this format."""
        case = self.case
        leaves: list[Tensor] = []
        wanted = list(case.requires_grad)

        def prepared(t: Tensor) -> Tensor:
            t = self._own(t, noise if move_inputs else None, sizes)
            place = len(leaves)
            wants = self.backward and _differentiable(t) and (place >= len(wanted) or wanted[place])
            leaves.append(t.requires_grad_(wants))
            return t.clone() if wants and writes else t

        writes = is_in_place(case.name) or "inplace" in case.kwargs or any(a is True for a in case.args)

        with torch.set_grad_enabled(self.backward):
            args, kwargs = mapped((tuple(case.args), dict(case.kwargs)), prepared, _wide_dtype if sizes is None else _size)
            call = self._callable()
            out = list(flat(call(*args, **kwargs)))
            if not self.backward:
                return list(out)
            given = [None if g is None else self._widened(g, noise if move_inputs else None) for g in case.gradients or ()]
            given = [g.abs().to(sizes) if g is not None and sizes is not None else g for g in given]
            return [None if g is None else g.detach() for g in self._gradients(out, leaves, given)]

    def _own(self, t: Tensor, noise: Noise | None, sizes: torch.dtype | None) -> Tensor:
        """Return an argument as the call takes it, in memory of its own."""
        if sizes is not None and t.is_floating_point():
            return (t.abs() if t.dtype == sizes and self.low is None else self._widened(t, noise).abs()).to(sizes)
        wide = self._widened(t, noise)
        return wide.clone() if wide.data_ptr() == t.data_ptr() else wide

    def _widened(self, t: Tensor, noise: Noise | None) -> Tensor:
        if not t.is_floating_point():
            return t.to(torch.complex128) if t.is_complex() else t
        wide = (t.detach() if self.low is None else t.detach().to(self.low)).to(torch.float64)
        if noise is not None:
            unit = min(SINGLE, noise.accumulate)
            wide = wide * noise.draws.factors(wide, self._inputs_error(t, unit)) if unit else wide
        return wide

    def _inputs_error(self, t: Tensor, unit: float) -> float:
        """Return the share of an input that a kernel's errors are worth: algorithms for n × n matrices go over it n times."""
        name = api(self.case.name)
        matrices = name.startswith("linalg_") or name in _ALGORITHMS
        return 2 * unit * math.sqrt(max(t.shape[-2:])) if matrices and t.ndim > 1 else unit

    def _gradients(
        self, out: Sequence[Tensor], leaves: Sequence[Tensor], given: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        if self.case.of_inputs or self.source == "formula":
            return self._of_leaves(out, leaves, given)
        if self.node.startswith(
            "ToCopy"
        ):  # the last thing that a composite did was to cast its result: it hands on what it gets
            return [*given]
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
        if len(pairs) > 1:  # a result may be made of another, whose recorded gradient has what comes of that in it
            for o, g in pairs:
                o.register_hook(lambda _, g=g, o=o: g.reshape(o.shape))
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad([o for o, _ in pairs], asked, [g.reshape(o.shape) for o, g in pairs], allow_unused=True)
        by_leaf = {id(leaf): g for leaf, g in zip(asked, found, strict=True)}
        each = [by_leaf.get(id(leaf)) for leaf in leaves]
        return each if self.edges is None else [None if e is None else each[e] for e in self.edges]

    def _callable(self) -> Callable[..., Any]:
        known = self._used_formula()
        return self._torch_function() if known is None else known.compute

    def _used_formula(self) -> Formula | None:
        return formulas()[api(self.case.name)] if self.source == "formula" else None

    def _torch_function(self) -> Callable[..., Any]:
        return _without_memory(operator_of(self.case), self.case.written)

    def _known(self) -> Callable[..., Any] | None:
        return self.case.function or function(self.case.name)

    def _edges_in_order(self) -> list[int | None]:
        """Return the edges of an operator that only another device has: its gradients are those of its tensors, in order."""
        given = self.case.tensors()
        for g, t in zip(self.case.results, given, strict=False):
            if g is not None and g.shape != t.shape:
                raise NotChecked(f"which argument each gradient of {self.case.name} is of cannot be told without its library")
        return [i if g is not None else None for i, g in enumerate(self.case.results[: len(given)])]

    def _has_formula(self) -> bool:
        """Return whether a formula takes these arguments."""
        known = formulas().get(api(self.case.name))
        if known is None or (known.wide and any(UNIT.get(t.dtype, 0.0) > SINGLE for t in self.case.tensors())):
            return False
        try:
            _signature(known.compute).bind(*self.case.args, **self.case.kwargs)
        except TypeError:
            return False
        return True

    def _known_edges(self) -> list[int | None] | None:
        """Return `_edges`, found once for calls of the same function whose arguments have the same shapes and formats."""
        case = self.case
        tree = mapped((tuple(case.args), dict(case.kwargs)), lambda t: (t.dtype, t.shape), repr)
        key = (self._known(), repr((case.name, tree, case.requires_grad, autocast(case))))
        if key not in _EDGES:
            while len(_EDGES) >= _MOST_EDGES:
                _EDGES.pop(next(iter(_EDGES)))
            edges = self._edges()
            _EDGES[key] = edges, self.node
        edges, self.node = _EDGES[key]
        return edges

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
            if not _differentiable(t) or not (place >= len(wanted) or wanted[place]):
                return t.to(low) if low is not None and t.dtype == torch.float32 else t.clone()
            entered = t.to(low or t.dtype).clone().requires_grad_().clone()
            entries[entered.grad_fn] = place
            return entered

        with without_dispatch(), torch.enable_grad():
            args, kwargs = mapped((tuple(self.case.args), dict(self.case.kwargs)), prepared, _on_host)
            node = _node([*flat(self._torch_function()(*args, **kwargs))])
        self.node = node.name()
        edges = [next_node for next_node, _ in node.next_functions]
        if any(e is not None and e not in entries for e in edges):
            return None
        return [None if e is None else entries[e] for e in edges]


def recorded_edges(case: Case) -> list[int | None] | None:
    """Return which tensor argument each recorded gradient is of; None where that cannot be told."""
    run = Run(case, True)
    return run._known_edges() if run._known() is not None else None


_signature = cache(inspect.signature)  # of formulas


def named_tensors(case: Case) -> list[tuple[str, Tensor]]:
    """Return the tensor arguments of a call, with the names that its formula gives them."""
    names = [*_signature(formulas()[api(case.name)].compute).parameters]
    given = [*zip(names, case.args, strict=False), *case.kwargs.items()]
    return [(name, t) for name, t in given if isinstance(t, Tensor)]


def _format_of_sizes(accumulate: float) -> torch.dtype:
    """Return what sizes are worked out in: of all but float64 results in float32, which rounds them by less than they tell."""
    return torch.float32 if accumulate > UNIT[torch.float64] else torch.float64


def _finite(sizes: list[Size]) -> list[Size] | None:
    """Return them, None where one is not finite."""
    return sizes if all(math.isfinite(float(size.sum())) for size, _ in sizes) else None


def _differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _node(out: Sequence[Tensor]) -> Any:
    node = next((o.grad_fn for o in out if o.grad_fn is not None), None)
    if node is None:
        raise NotChecked("nothing of this call requires a gradient here")
    return node


def _without_memory(call: Callable[..., Any], written: Iterable[str]) -> Callable[..., Any]:
    """Return the function without `out=` and devices: it runs on the host, into memory of its own.

    written: the arguments that it gives where it returns nothing.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("out", None)
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        result = call(*args, **kwargs)
        if result is not None or not args:
            return result
        return [args[int(place)] for place in written if place.isdigit()] or args[0]

    return called


def _wide_dtype(leaf: Any) -> Any:
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else _on_host(leaf)


def _size(leaf: Any) -> Any:
    return abs(leaf) if isinstance(leaf, float) else _wide_dtype(leaf)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, str) and leaf.partition(":")[0] in {"cuda", "npu", "mps", "xpu", "musa", "hpu"}:
        return "cpu"
    return leaf
