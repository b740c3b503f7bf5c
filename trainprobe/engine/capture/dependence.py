"""On which inputs an output depends: a backward pass over its autograd graph that nothing of the program notices.

The nodes are called one by one, and not by autograd's engine: no hook runs, of the program or of a tap, no gradient is
accumulated, and nothing that the graph keeps is released. It costs about one backward pass, all of its memory is transient, and
nothing is read by the host. A graph with functions of the program's own, which may do anything, is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import reason_without_statistics
from trainprobe.engine.arrays.without_dispatch import without_dispatch

Edge = tuple[Any, int]  # a node of the graph and the number of its output
_MOST_NODES, _LONGEST, _TABLES = 20_000, 4096, 16  # nodes of a graph, places of a row, and constants, that are looked at
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_PLAIN = (Tensor, torch.nn.Parameter)


def graph_of(out: Tensor) -> list[Any]:
    """Return the nodes behind a tensor, each before those that it hands gradients to; none where one must not be run.

    Must not: functions of the program's own, of a compiled part, of an extension; more than 20,000 nodes; batch statistics, by
    which everything in a batch depends on everything; a kept tensor whose memory was given back or that was written since.
    """
    nodes: list[Any] = [] if out.grad_fn is None else [out.grad_fn]
    seen, waiting = set(nodes), Counter[Any]()
    for node in nodes:  # grows
        name = node.name()
        foreign = isinstance(node, torch.autograd.function.BackwardCFunction) or ("::" in name and name != _ACCUMULATES)
        if foreign or "BatchNorm" in name or len(nodes) > _MOST_NODES or not all(map(_is_there, _kept(node))):
            return []
        waiting.update(inner for inner, _ in node.next_functions if inner is not None)
        fresh = dict.fromkeys(inner for inner, _ in node.next_functions if inner is not None and inner not in seen)
        nodes.extend(fresh)
        seen.update(fresh)
    ordered = nodes[:1]
    for node in ordered:  # grows
        for inner, _ in node.next_functions:
            if inner is not None:
                waiting[inner] -= 1
                if not waiting[inner]:
                    ordered.append(inner)
    return ordered


def looked_up(nodes: Sequence[Any], shape: Sequence[int]) -> list[Edge]:
    """Return the outputs of embeddings among these nodes that are looked up by whole numbers of a shape [rows, time]."""
    return [(node, 0) for node in nodes if node.name() == "EmbeddingBackward0" and node._saved_indices.shape == shape]


def reach(out: Tensor, nodes: Sequence[Any], inputs: Sequence[Edge], places: Sequence[Edge]) -> Mapping[Edge, Tensor]:
    """Return how far the first half of the last row of `out` reaches into what is behind it.

    out: [rows, time, …]. nodes: `graph_of(out)`. inputs: where the pass ends. places: further edges that are looked at, each
    [rows, time, …] as the inputs. Returned for each edge that was met, float32 [4]: the largest absolute gradient at any place,
    at later places of the last row, in other rows, and the last place of the row with a gradient above a millionth of the
    largest. Not a number counts as 0.
    """
    with without_dispatch(), torch.no_grad():
        half = out.shape[1] // 2
        seed = torch.zeros_like(out)
        early = seed[-1, :half]
        early.copy_(torch.arange(early.numel(), device=out.device).mul(1.7).cos().reshape(early.shape))
        return dict(_passed(out, nodes, {edge[0] for edge in inputs}, {*inputs, *places}, seed, half))


def attentions(nodes: Sequence[Any], time: int) -> tuple[int, int, list[Tensor], list[Tensor], list[Tensor]]:
    """Return how many attentions of a graph go from `time` places to as many, and what says that they are causal.

    Returned behind it: how many of them were told so; for masks that fused attentions were given, for probabilities, and for
    conditions by which numbers were masked, whether each is triangular, as bool []. A triangular matrix has one number above
    its diagonal, and another on it; of a batch the last one is looked at.
    """
    found, told, masks = 0, 0, dict[str, list[Tensor]](given=[], shares=[], conditions=[])
    if not 2 <= time <= _LONGEST:
        return 0, 0, [], [], []
    known: dict[tuple[Any, ...], Tensor] = {}

    def look(kind: str, t: Any) -> None:
        if isinstance(t, Tensor) and t.dim() >= 2 and t.shape[-2:] == (time, time):
            last = t[(-1,) * (t.dim() - 2)]
            key = (t.data_ptr(), last.data_ptr(), last.stride(), t.dtype)
            known[key] = known[key] if key in known else _triangular(last)
            masks[kind].append(known[key])

    with without_dispatch(), torch.no_grad():
        for node in nodes:
            name = node.name()
            if hasattr(node, "_saved_is_causal"):
                if node._saved_query.shape[-2] == time == node._saved_key.shape[-2]:
                    found += 1
                    told += bool(node._saved_is_causal)
                    look("given", getattr(node, "_saved_attn_mask", getattr(node, "_saved_attn_bias", None)))
            elif "Softmax" in name and hasattr(node, "_saved_result"):
                found += node._saved_result.dim() > 2 and node._saved_result.shape[-2:] == (time, time)
                look("shares", node._saved_result)
            elif name in ("MaskedFillBackward0", "WhereBackward0"):
                look("conditions", node._saved_mask if name[0] == "M" else node._saved_condition)
    return found, told, masks["given"], masks["shares"], masks["conditions"]


def equal_places(nodes: Sequence[Any], time: int, bounds: Sequence[int]) -> list[Tensor]:
    """Return of constants [time, features] that are multiplied with what has a gradient (rotary positions), for each bound:
    how many rows from it on there are, but for the first, how many of them equal the row before, and how many do below it.

    Of the constant with most such rows, int64 [].
    """
    found: list[Tensor] = []
    with without_dispatch(), torch.no_grad():
        kept = [t for node in nodes if node.name() == "MulBackward0" for t in _kept(node)]
        tables = [
            t for t in kept if t.dim() >= 2 and t.shape[-2] == time and t.shape[-1] > 1 and t.numel() == time * t.shape[-1]
        ]
        tables = list({(t.data_ptr(), t.shape): t for t in tables if not t.requires_grad}.values())[:_TABLES]
        for bound in bounds if tables else ():
            same = torch.stack([_equal_to_last(t.reshape(time, -1)) for t in tables])
            late = same[:, max(0, bound - 1) :]
            found += [
                late.new_full((), late.shape[1], dtype=torch.int64),
                late.sum(1).amax(),
                same[:, : bound - 1].sum(1).amin(),
            ]
    return found


def _equal_to_last(rows: Tensor) -> Tensor:
    return (rows[1:] == rows[:-1]).all(1)


def _triangular(matrix: Tensor) -> Tensor:
    corner = matrix[0, -1]
    above = torch.ones_like(matrix, dtype=torch.bool).triu(1)
    return ((matrix == corner) | ~above).all() & (matrix.diagonal() != corner).all()


def _passed(
    out: Tensor, nodes: Sequence[Any], ends: set[Any], edges: set[Edge], seed: Tensor, half: int
) -> Iterator[tuple[Edge, Tensor]]:
    leads = set(ends)
    for node in reversed(nodes):
        if any(inner in leads for inner, _ in node.next_functions):
            leads.add(node)
    gradients: dict[Any, dict[int, Tensor]] = {out.grad_fn: {out.output_nr: seed}}
    for node in nodes:
        arrived = gradients.pop(node, None)
        if arrived is None:
            continue
        for number, gradient in arrived.items():
            if (node, number) in edges:
                yield (node, number), _reached(gradient, half)
        if node in ends or node not in leads:
            continue
        given = node(*[arrived.get(i) for i in range(len(node._input_metadata))])
        for (inner, number), gradient in zip(
            node.next_functions, given if isinstance(given, tuple) else (given,), strict=False
        ):
            if inner in leads and gradient is not None:
                its = inner._input_metadata[number]
                own = gradient.sum_to_size(its.shape).to(its.dtype)
                before = gradients.setdefault(inner, {})
                before[number] = before[number] + own if number in before else own


def _reached(gradient: Tensor, half: int) -> Tensor:
    size = gradient.abs().nan_to_num(0.0).reshape(*gradient.shape[:2], -1).amax(2).float()  # [rows, time]
    largest, row = size.amax(), size[-1]
    last = (torch.arange(len(row), device=row.device) * (row > 1e-6 * largest)).amax()
    others = size[:-1].amax() if len(size) > 1 else largest.new_zeros(())
    return torch.stack((largest, row[half:].amax(), others, last.float()))


@cache
def _kept_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def _kept(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node keeps. Raises RuntimeError for one that was written since."""
    for name in _kept_names(type(node)):
        kept = getattr(node, name)
        yield from (t for t in (kept if isinstance(kept, tuple) else (kept,)) if isinstance(t, Tensor))


def _is_there(t: Tensor) -> bool:
    """Tell whether a tensor is a plain one with memory behind it."""
    if type(t) not in _PLAIN:
        return False
    there = t.detach()
    return not reason_without_statistics(there[tuple(0 if step == 0 else slice(None) for step in there.stride())])
