"""Optimizer states that Megatron's distributed optimizer stored bucket by bucket inside a `torch_dist` checkpoint.

`dp_reshardable`, the default of Megatron-LM: for each tensor and pipeline rank, each buffer and bucket, one flat tensor a slot
(`optimizer.distributed.dp_group_idx_R.gbuf_idx_G.dtype_(…).bucket_idx_B.exp_avg`). Which parameters a rank held follows from
the model's own tensors in the same checkpoint, and their order from how Megatron builds its models (`megatron_order`). They
must fill the buckets to the element, begin where stored chunks begin, and have masters that are the weights once they are
rounded; a parameter for which that does not hold is reported and not placed.
Source: `megatron.core.optimizer.distrib_optimizer.sharded_param_state_dp_reshardable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

from trainprobe.ckpt_compare.masters import Agreement, not_placed, strangers
from trainprobe.ckpt_compare.megatron_buckets import bucket_places
from trainprobe.ckpt_compare.megatron_optimizer import FLAT_SLOTS, SHARED
from trainprobe.ckpt_compare.megatron_order import model_orders
from trainprobe.ckpt_compare.megatron_shards import Local, Ranks, axis_of, place
from trainprobe.ckpt_compare.pieces import LogicalTensor, Problem, gather, window
from trainprobe.engine.geometry.rectangles import Point

_KEY = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_(?P<dtype>.+?)\.bucket_idx_(?P<bucket>\d+)\.(?P<slot>\w+)"
)
_LAYER = re.compile(r"(?P<head>(?:.*\.)?layers\.)(?P<n>\d+)\.(?P<tail>.+)")


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat tensor of one bucket."""

    chain: int
    rank: int
    buffer: int
    bucket: int
    slot: str
    tensor: LogicalTensor


def is_bucket(key: str) -> bool:
    """Tell whether a stored tensor is (part of) a bucket."""
    return ".distributed.dp_group_idx_" in key


def bucket_states(
    stored: Mapping[str, LogicalTensor],
    weights: Sequence[LogicalTensor],
    config: Mapping[str, Any],
    layout: Mapping[str, int],
    problems: list[Problem],
) -> Iterator[LogicalTensor]:
    """Yield the optimizer's tensors. weights: the model's, under global names, in the order in which the model holds them."""
    buckets = sorted((b for key, t in stored.items() if (b := _bucket(key, t)) is not None), key=_order)
    for (chain, rank), group in groupby(buckets, key=lambda b: (b.chain, b.rank)):
        held = list(group)
        where = f"optimizer of model-parallel rank {rank}"
        experts = any(_expert(w.name) for w in weights)
        if experts and config.get("grouped"):
            problems.append(Problem(where, "states of grouped experts are stored in an order that is not known here"))
            continue
        if chain and not experts:
            problems.append(Problem(where, "a second optimizer of a chain belongs to no expert"))
            continue
        ranks = _ranks(rank, chain, layout)
        orders = [
            list(_chunks(order, weights, ranks, layout, config, None if not experts else bool(chain)))
            for order in model_orders([w.name for w in weights])
        ]
        buffers = [list(b) for _, b in groupby(held, key=lambda b: b.buffer)]
        if len(orders[0]) != len(buffers):
            problems.append(Problem(where, f"{len(buffers)} buffers do not fit {len(orders[0])} parts of the model"))
            continue
        known = {w.name: w for w in weights}
        for i, buffer in enumerate(buffers):
            yield from _best([chunks[i] for chunks in orders], buffer, ranks, config, known, where, problems)


def _bucket(key: str, tensor: LogicalTensor) -> Bucket | None:
    match = _KEY.fullmatch(key)
    if match is None or match["slot"] not in FLAT_SLOTS:
        return None
    chain, rank, buffer, bucket = (int(match[name] or 0) for name in ("chain", "rank", "buffer", "bucket"))
    return Bucket(chain, rank, buffer, bucket, FLAT_SLOTS[match["slot"]], tensor)


def _order(b: Bucket) -> tuple[int, ...]:
    return b.chain, b.rank, b.buffer, b.bucket


def _expert(name: str) -> bool:
    return ".experts." in name


def _ranks(rank: int, chain: int, layout: Mapping[str, int]) -> Ranks:
    """Tensor rank first, then expert rank (for experts), then pipeline rank."""
    tp, ep = layout.get("tp", 1), layout.get("ep", 1)
    if not chain:
        return Ranks(rank % tp, tp, rank // tp, 0, ep)
    etp = layout.get("etp", tp)
    return Ranks(rank % etp, tp, rank // etp // ep, rank // etp % ep, ep, etp)


def _chunks(
    order: Sequence[str],
    weights: Sequence[LogicalTensor],
    ranks: Ranks,
    layout: Mapping[str, int],
    config: Mapping[str, Any],
    experts: bool | None,
) -> Iterator[list[Local]]:
    """Yield what this rank held, one list a virtual stage, in an order of the model's parameters."""
    pp, vpp = layout.get("pp", 1), layout.get("vpp", 1)
    layers = 1 + max((int(m["n"]) for n in order if (m := _LAYER.fullmatch(n))), default=-1)
    per_stage = layers // (pp * vpp)
    shapes = {w.name: w.shape for w in weights}
    for v in range(vpp):
        stage = v * pp + ranks.pp
        first, last = stage * per_stage, layers if stage == pp * vpp - 1 else (stage + 1) * per_stage
        names = [n for n in order if _on_stage(n, stage, pp * vpp, first, last)]
        if stage == pp * vpp - 1 and stage and config.get("tied") and SHARED[0] in shapes:
            names.append(SHARED[0])  # the last stage holds the embedding once more, as its head
        if experts is not None:
            names = [n for n in names if _expert(n) == experts and (not experts or _own(n, ranks, config))]
        yield [_local(n, shapes[n], ranks, v) for n in names]


def _on_stage(name: str, stage: int, stages: int, first: int, last: int) -> bool:
    match = _LAYER.fullmatch(name)
    if match is not None:
        return first <= int(match["n"]) < last
    return stage == 0 if name.startswith("embedding.") else stage == stages - 1


def _own(name: str, ranks: Ranks, config: Mapping[str, Any]) -> bool:
    match = re.search(r"\.local_experts\.(\d+)\.", name)
    count = int(config.get("experts") or 0) // ranks.ep_size
    return match is not None and bool(count) and int(match[1]) // count == ranks.ep


def _local(name: str, shape: Point, ranks: Ranks, chunk: int) -> Local:
    """Describe this rank's part of a parameter, without its numbers."""
    axis, size = axis_of(name, shape), ranks.of(name).tp_size
    cut = shape if axis is None else (*shape[:axis], shape[axis] // size, *shape[axis + 1 :])
    return Local(name, _NoNumbers(cut), "", chunk=chunk, shape=cut)


@dataclass(frozen=True, slots=True)
class _NoNumbers:
    shape: Point
    format: Any = None

    def load(self) -> Any:
        raise NotImplementedError


def _best(
    orders: Sequence[Sequence[Local]],
    buffer: Sequence[Bucket],
    ranks: Ranks,
    config: Mapping[str, Any],
    weights: Mapping[str, LogicalTensor],
    where: str,
    problems: list[Problem],
) -> list[LogicalTensor]:
    """Place a buffer in the order that leaves the fewest masters which are not their weights; leave those out."""
    best: tuple[list[LogicalTensor], dict[str, Agreement | None]] | None = None
    for chunk in orders:
        placed = _placed(chunk, buffer, ranks, config)
        if placed is not None:
            masters = gather(t for t in placed if t.slot == "master")
            mismatches = dict(strangers(masters.values(), weights)) if masters else dict.fromkeys(t.name for t in placed)
            if best is None or len(mismatches) < len(best[1]):
                best = placed, mismatches
            if not mismatches:
                break
    if best is None:
        sizes = [b.tensor.shape[0] for b in buffer if b.slot == buffer[0].slot]
        text = f"buckets of {sizes} elements are not filled by the {len(orders[0])} parameters that this rank should hold"
        problems.append(Problem(where, text))
        return []
    placed, mismatches = best
    if mismatches:
        problems.append(Problem(where, not_placed(mismatches)))
    return [t for t in placed if t.name not in mismatches]


def _placed(
    chunk: Sequence[Local], buffer: Sequence[Bucket], ranks: Ranks, config: Mapping[str, Any]
) -> list[LogicalTensor] | None:
    """Return the tensors of a buffer whose parameters stand in this order, None where they cannot."""
    tensors = [list(held) for _, held in groupby(buffer, key=lambda b: b.bucket)]
    places = bucket_places([w.local_shape for w in chunk], [held[0].tensor.shape[0] for held in tensors])
    if places is None:
        return None
    made: list[LogicalTensor] = []
    for local, (bucket, start) in zip(chunk, places, strict=True):
        stop = start + prod(local.local_shape)
        for one in tensors[bucket]:
            if len(one.tensor.pieces) > 1 and not any(piece.offset[0] == start for piece in one.tensor.pieces):
                return None  # Megatron stores each parameter, and each gap between two, as a chunk of its own
            for piece in one.tensor.pieces:
                lo, hi = max(start, piece.offset[0]), min(stop, piece.offset[0] + piece.shape[0])
                if lo < hi:
                    part = window(piece.source, (slice(lo - piece.offset[0], hi - piece.offset[0]),))
                    flat = replace(local, source=part, slot=one.slot, where=piece.where, start=lo - start)
                    made += place(flat, ranks, config)
    return made
