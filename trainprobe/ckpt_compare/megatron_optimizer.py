"""Megatron's optimizer state in per-rank files: which number, or which range of a flat buffer, belongs to which parameter.

Order of parameters in groups: `megatron.core.optimizer._get_param_groups` (named parameters of all model chunks; weight decay
is off for biases and one-dimensional parameters; expert parameters apart). The distributed optimizer's buffers: see
`megatron_buckets`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.megatron_buckets import coalesced_starts, likely_buckets
from trainprobe.ckpt_compare.megatron_shards import Local as Local
from trainprobe.ckpt_compare.optimizer_names import is_array, scalar
from trainprobe.ckpt_compare.pieces import Problem, Reshaped, window
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.errors import FormatError

SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")  # what tied stages share
FLAT_SLOTS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def local_states(
    optimizer: Any, flat_file: Path, weights: Sequence[Local], problems: list[Problem], config: Mapping[str, Any]
) -> tuple[list[Local], set[float]]:
    """Return this rank's optimizer states as local tensors, and the step counts found."""
    found: list[Local] = []
    steps: set[float] = set()
    for part in _chain(optimizer):
        inner = part.get("optimizer", part) if "param_groups" not in part else part
        groups = inner.get("param_groups", [])
        steps.update(scalar(g["step"]) for g in groups if "step" in g)
        members = list(_members(groups, weights))
        found += _numbered(inner.get("state", {}), groups, members, steps, problems)
        found += _masters(part.get("fp32_from_fp16_params"), members, problems)
    if flat_file.is_file():
        found += _flat(flat_file, weights, problems, config)
    return found, steps


def _chain(optimizer: Any) -> list[Mapping[str, Any]]:
    """Return the optimizers of a chain, or the only one."""
    if isinstance(optimizer, (list, tuple)):
        return [o for o in optimizer if isinstance(o, Mapping)]
    if isinstance(optimizer, Mapping) and optimizer and all(isinstance(k, int) or str(k).isdigit() for k in optimizer):
        return [o for o in optimizer.values() if isinstance(o, Mapping)]
    return [optimizer] if isinstance(optimizer, Mapping) else []


def _expert(local: Local) -> bool:
    return ".experts." in local.name


def _members(groups: Sequence[Mapping[str, Any]], weights: Sequence[Local]) -> Iterator[list[Local]]:
    """Yield the parameters of each group, in order."""
    some_expert = any(g.get("is_expert_parallel") for g in groups)
    decoupled = any(g.get("is_decoupled_lr") for g in groups)
    for group in groups:
        decays = float(group.get("wd_mult", 1.0) or 0.0) != 0.0
        chosen = [w for w in weights if (len(w.local_shape) > 1 and not w.name.endswith(".bias")) == decays]
        if some_expert or any("is_expert_parallel" in g for g in groups):
            count = len(group.get("params", []))
            apart = [w for w in chosen if _expert(w) == bool(group.get("is_expert_parallel"))]
            # without expert parallelism experts are ordinary parameters
            chosen = apart if len(apart) == count else chosen
        if decoupled:
            ends = [w for w in chosen if "word_embeddings" in w.name or "output_layer" in w.name]
            chosen = ends if group.get("is_decoupled_lr") else [w for w in chosen if w not in ends]
        yield chosen


def _numbered(
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[Local]],
    steps: set[float],
    problems: list[Problem],
) -> Iterator[Local]:
    """Yield the states that are stored by number, if every shape agrees with the parameter it falls to."""
    by_number = {int(k): v for k, v in state.items() if str(k).isdigit()}
    for group, chosen in zip(groups, members, strict=True):
        numbers = [int(i) for i in group.get("params", [])]
        if not any(n in by_number for n in numbers):
            continue
        pairs = list(zip(chosen, (by_number.get(n, {}) for n in numbers), strict=False))
        if len(chosen) != len(numbers) or not all(_fits(w, s) for w, s in pairs):
            where = chosen[0].where if chosen else "optimizer"
            problems.append(
                Problem(where, f"{len(numbers)} optimizer states do not fit the {len(chosen)} parameters of their group")
            )
            continue
        for weight, values in pairs:
            for slot, value in values.items():
                if slot == "step":
                    steps.add(scalar(value))
                elif is_array(value):
                    yield replace(weight, source=value, slot=slot, where=f"{weight.where} ({slot})")


def _fits(weight: Local, values: Mapping[str, Any]) -> bool:
    return all(v.shape == weight.local_shape for v in values.values() if is_array(v) and v.shape)


def _masters(groups: Any, members: Sequence[Sequence[Local]], problems: list[Problem]) -> Iterator[Local]:
    """Yield the fp32 copies of half-precision parameters, which follow the order of the groups."""
    for masters, chosen in zip(groups or (), members, strict=False):
        halves = [w for w in chosen if w.source.format.name in ("float16", "bfloat16")]
        if len(halves) != len(masters) or any(m.shape != w.local_shape for m, w in zip(masters, halves, strict=False)):
            where = chosen[0].where if chosen else "optimizer"
            problems.append(
                Problem(where, f"{len(masters)} fp32 master weights do not fit the {len(halves)} parameters of their group")
            )
            continue
        for weight, master in zip(halves, masters, strict=True):
            yield replace(weight, source=master, slot="master", where=f"{weight.where} (master)")


def _flat(file: Path, weights: Sequence[Local], problems: list[Problem], config: Mapping[str, Any]) -> Iterator[Local]:
    """Yield the states of a distributed optimizer from its flat buffers, one a model chunk (and one for experts)."""
    try:
        content = torch_archive.load(str(file))
    except FormatError as error:
        problems.append(Problem(str(file), str(error)))
        return
    chunks = sorted({w.chunk for w in weights})
    apart = [o for e in (False, True) for c in chunks if (o := [w for w in weights if w.chunk == c and _expert(w) == e])]
    # without expert parallelism experts share the buffer of the others
    owners = [o for c in chunks if (o := [w for w in weights if w.chunk == c])] + apart
    for buffer in _buffers(content):
        size = next(v.shape[0] for v in buffer.values() if is_array(v))
        # buffers stand in the order of their owners; a rank that holds experts alone has none for the others
        starts = None
        while owners and starts is None:
            owned = owners.pop(0)
            starts = starts_in(owned, size, config)
            if starts is not None:
                yield from _filled(file, buffer, owned, starts)
        if starts is None:
            problems.append(
                Problem(str(file), f"no part of the model fills a buffer of {size} elements: its buckets are not known")
            )
            return


def starts_in(owned: Sequence[Local], size: int, config: Mapping[str, Any]) -> list[int] | None:
    """Return where each of these parameters begins in a coalesced buffer of this size, None where they cannot fill it."""
    shapes = [w.local_shape for w in owned]
    pipelined = int(config.get("pp") or 1) > 1 and config.get("tied")
    shared = [bool(pipelined) and w.name in SHARED for w in owned]
    return coalesced_starts(shapes, size, likely_buckets(shapes, shared, config))


def _filled(file: Path, buffer: Mapping[str, Any], owned: Sequence[Local], starts: Sequence[int]) -> Iterator[Local]:
    """Yield the states of one flat buffer, parameter by parameter."""
    for weight, start in zip(owned, starts, strict=True):
        for key, slot in FLAT_SLOTS.items():
            if is_array(buffer.get(key)):
                part = window(buffer[key], (slice(start, start + prod(weight.local_shape)),))
                where = f"{file.parent.name}/{file.name}: {weight.name} ({slot})"
                yield replace(weight, source=Reshaped(part, weight.local_shape), slot=slot, where=where)


def _buffers(content: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the innermost dicts that hold `exp_avg`, in order: by optimizer of a chain, by buffer, by dtype."""
    if isinstance(content, Mapping) and "exp_avg" in content:
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _buffers(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _buffers(value)
