"""Gives the tensors of a checkpoint the one name that each has everywhere, by the maps of engine.model_names."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, gather
from trainprobe.ckpt_compare.transforms import TRANSFORMS, lacking
from trainprobe.engine.model_names import ADAPTER, TRAINED_WHOLE, NameMap, NameRule, built_in, read_map
from trainprobe.engine.storage.safe_files import read_text
from trainprobe.errors import FormatError

_SPLIT = ("weight", "bias")  # what the rows of fused parameters are dealt out of


def _read(path: str) -> NameMap:
    try:
        return read_map(read_text(Path(path)), path)
    except OSError as error:
        raise FormatError(f"--names {path}: {error.strerror or error}; name a YAML file (docs/ckpt_compare.md)") from None


def find_map(checkpoint: Checkpoint, extra: Sequence[str] = ()) -> tuple[NameMap, str] | None:
    """Return the map for a checkpoint's names and the wrapper's prefix.

    A user's maps are asked first. None when no map fits.
    """
    maps = [_read(p) for p in extra] + list(built_in())
    names = sorted({t.name for t in checkpoint.tensors.values()})
    found = next(((m, prefix) for m in maps if (prefix := m.wrapper(names)) is not None), None)
    if found is None:
        return None
    family, prefix = found
    return family.of((t.name.removeprefix(prefix), t.shape) for t in checkpoint.tensors.values()), prefix


def in_model_order(names: Sequence[str]) -> list[str] | None:
    """Return parameter names in the order in which the model defines them, or None when no map knows all of them."""
    for family in built_in():
        prefix = family.wrapper(names)
        places = None if prefix is None else [_place(family, n.removeprefix(prefix)) for n in names]
        if places is not None and None not in places:
            return [name for _, name in sorted(zip(places, names, strict=True))]
    return None


def _place(family: NameMap, name: str) -> tuple[int, int, int] | None:
    """Return a sort key: before, in or after the layers, then the layer, then the place within it."""
    layered = [i for i, p in enumerate(family.order) if "(?P<L>" in p.pattern]
    for i, pattern in enumerate(family.order):
        match = pattern.fullmatch(name)
        if match is not None:
            layer = match.groupdict().get("L")
            return (1, int(layer), i) if layer is not None else (0 if i < layered[0] else 2, 0, i)
    return None


def to_logical(checkpoint: Checkpoint, config: Mapping[str, Any], extra: Sequence[str] = ()) -> Checkpoint:
    """Return the checkpoint with its tensors under logical names, split into their logical parts.

    config: the model's heads, groups, head_dim, gated, where known. A rule that needs a number nobody knows leaves its tensor
    fused, and a note says so.
    """
    found = find_map(checkpoint, extra)
    if found is None:
        return _without_adapter_names(checkpoint)
    names, prefix = found
    notes: list[str] = []
    tensors = gather(part for t in checkpoint.tensors.values() for part in apply(names, t, config, notes, prefix))
    return replace(
        checkpoint,
        tensors=tensors,
        family=checkpoint.family or names.family,
        notes=(*checkpoint.notes, *dict.fromkeys(notes)),
    )


def _without_adapter_names(checkpoint: Checkpoint) -> Checkpoint:
    """Name the adapters of a model that no map knows, and what they adapt, as those of any other."""
    if not any(
        ".base_layer." in t.name or TRAINED_WHOLE.search(t.name) or ADAPTER.fullmatch(t.name)
        for t in checkpoint.tensors.values()
    ):
        return checkpoint
    plain = NameMap("", (), (), ())
    return replace(checkpoint, tensors=gather(part for t in checkpoint.tensors.values() for part in apply(plain, t, {}, [])))


def apply(
    names: NameMap, tensor: LogicalTensor, config: Mapping[str, Any], notes: list[str], prefix: str = ""
) -> list[LogicalTensor]:
    """Return the logical tensors that one stored tensor holds."""
    name = names.stripped(tensor.name.removeprefix(prefix)).replace(".base_layer.", ".")
    name = TRAINED_WHOLE.sub(".", name)
    if names.kind_of(name)[0] and (adapter := ADAPTER.fullmatch(name)) is not None:
        weight = ".weight" if adapter["lora"] else adapter["weight"] or ""  # of LoRA both ways to write it
        return [tensor.renamed(f"{_adapted(names, adapter['base'])}.{adapter['part']}{weight}{_which(adapter)}")]
    found = names.rule_of(name, config)
    if found is None:
        return [tensor.renamed(name)]
    rule, match = found
    if rule.drop:
        return []
    if unknown := lacking(rule.by, tensor, config):
        options = ", ".join(f"--{need.replace('_', '-')}" for need in unknown)
        notes.append(
            f"{', '.join(unknown)} unknown: tensors such as {name} are compared as they are stored; give {options}, "
            "or put the model's config.json beside the file"
        )
        return [tensor.renamed(name)]
    if rule.by and match.groupdict().get("p") not in (None, *_SPLIT):
        return [tensor.renamed(name)]  # codes or scales of a fused matrix, which only whole have a meaning
    return _renamed(tensor, rule, match, config)


def _which(adapter: re.Match[str]) -> str:
    """Return ` (NAME)` of an adapter beside the first, which PEFT calls `default`."""
    return adapter["further"] or (f" ({adapter['which']})" if adapter["which"] not in (None, "default") else "")


def _adapted(names: NameMap, base: str) -> str:
    """Return the logical name of the module that an adapter (LoRA) adapts; its own where that is split into several."""
    for rule in names.rules:
        match = rule.pattern.fullmatch(f"{base}.weight")
        if match is not None and len(rule.to) == 1 and not rule.when:
            return rule.name_of(match).removesuffix(".weight")
    return base


def _renamed(tensor: LogicalTensor, rule: NameRule, match: re.Match[str], config: Mapping[str, Any]) -> list[LogicalTensor]:
    found: list[tuple[LogicalTensor, list[int]]] = [(tensor, [])]
    for by in rule.by:
        found = [(part, [*at, i]) for t, at in found for i, part in enumerate(TRANSFORMS[by](t, config))]
    out: list[LogicalTensor] = []
    for part, at in found:
        name, native = sys.intern(rule.name_of(match, at)), tensor.native or tensor.name
        out.append(LogicalTensor(name, part.shape, part.held, part.slot, native, rule.vocabulary))
    return out
