"""Pair the tensors of two checkpoints under one key: tied heads, shared values, padded vocabularies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainprobe.ckpt_compare.adapters import is_projection
from trainprobe.ckpt_compare.pairing import find_aliases, hold_the_same
from trainprobe.ckpt_compare.pieces import LogicalTensor, bottom, origin
from trainprobe.ckpt_compare.quantised import Undecoded, not_compared, scheme_of
from trainprobe.ckpt_compare.results import RowVerdict, TensorRow
from trainprobe.ckpt_compare.vocabulary import padding_reason
from trainprobe.engine.geometry.rectangles import Rectangle

UNTIED = "(untied)"  # in place of the tensor that a head shares its values with
_HEADS = ("output.", "lm_head.", "proj_out.", "cls.", "embed_out.")


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors to compare, and the part of both that is compared. rest: why that is not all, where it should be."""

    a: LogicalTensor
    b: LogicalTensor
    box: Rectangle
    note: str = ""
    rest: str = ""


def pair_of(
    key: str,
    left: Mapping[str, LogicalTensor],
    right: Mapping[str, LogicalTensor],
    configs: tuple[Mapping[str, Any], Mapping[str, Any]],
    shared: Mapping[str, str],
) -> TensorPair | TensorRow:
    """Pair the tensors of one key, or say why there is no pair.

    A head that is tied to the embedding on one side is held against the embedding; a tensor that shares the values of another
    one (`shared`) is held against that one where the other side stores it once.
    """
    x, y = left.get(key), right.get(key)
    note = ""
    if x is None or y is None:
        others, side = (right, "B") if y is None else (left, "A")
        owner = shared.get(key, UNTIED)
        tied = others.get(_embedding_of(key) if owner == UNTIED else owner)
        if tied is None or _lost(key, shared, configs["AB".index(side)]):
            own = "whose configuration says" if configs["AB".index(side)].get("tied") is False else "as the other side shows"
            note = f"lost in {side}, {own} that it is not tied to the embedding" if tied is not None else _undrawn(key, side)
            verdict: RowVerdict = "only in A" if y is None else "only in B"
            section = re.search(r" \((.+)\)(?:#|$)", key)  # of a second model in one file
            reason = f"of {section[1]} {verdict}" if section is not None else ""
            return TensorRow(key, verdict, x, y, note=note, reason=reason)
        note = f"{side} stores it once, as {tied.key}"
        x, y = x or tied, y or tied
    hidden = next((scheme_of(t) for t in (x, y) if t.stored and isinstance(bottom(t.pieces[0].source), Undecoded)), "")
    if hidden:
        return TensorRow(key, "incomplete", x, y, note=not_compared(hidden), reason=not_compared(hidden))
    box = _common_box(x, y)
    if box is None:
        return TensorRow(key, "shape", x, y, note=f"shapes {list(x.shape)} and {list(y.shape)} are not the same")
    pair = TensorPair(x, y, box, note)
    return pair if x.shape == y.shape else _padded(pair, configs)


def _undrawn(key: str, side: str) -> str:
    if not is_projection(key):
        return ""
    return f"{side} draws it when it is loaded, and no adapter_config.json on both sides says that it is drawn from the same"


def shared_values(
    left: Mapping[str, LogicalTensor], right: Mapping[str, LogicalTensor], configs: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> dict[str, str]:
    """Return which tensors that one side lacks are copies of which ones that both sides hold."""
    found: dict[str, str] = {}
    for mine, others, config in ((left, right, configs[1]), (right, left, configs[0])):
        one_sided = {
            k: t for k, t in mine.items() if k not in others and not (config.get("tied") is False and k.startswith(_HEADS))
        }
        if one_sided:
            equal = find_aliases(one_sided, {k: t for k, t in mine.items() if k in others})
            found |= {k: owner for k, owner in equal.items() if _may_share(mine[k], mine[owner])}
        for key in one_sided:
            own = mine.get(_embedding_of(key))
            if own is not None and config.get("tied") is not True and not hold_the_same(own, one_sided[key]):
                found[key] = UNTIED
    return found


def _may_share(one: LogicalTensor, owner: LogicalTensor) -> bool:
    """Whether tensors of equal values are one parameter: they lie in the same place, or are an embedding, or belong to a head.

    Equal values alone are no proof: a tensor that got lost may have been a copy.
    """
    same_place = [p.source for p in one.pieces] == [p.source for p in owner.pieces]
    return same_place or "embed" in owner.name or "shared" in owner.name.split(".") or one.name.startswith(_HEADS)


def _lost(key: str, shared: Mapping[str, str], config: Mapping[str, Any]) -> bool:
    """Whether a head that one side lacks is a tensor of its own on the other side, or by the configuration."""
    return shared.get(key) == UNTIED or (config.get("tied") is False and key.startswith(_HEADS))


def _padded(pair: TensorPair, configs: tuple[Mapping[str, Any], Mapping[str, Any]]) -> TensorPair:
    """Say of the rows that only one side has whether they are padding; if nothing says so, they are missing."""
    sides = sorted(zip((pair.a.shape[0], pair.b.shape[0]), configs, "AB", strict=True), key=lambda side: side[0])
    (fewer, config_fewer, _), (more, config_more, side) = sides
    reason = padding_reason(fewer, more, config_fewer, config_more)
    if reason is not None:
        return replace(pair, note=f"rows {fewer} to {more - 1} are vocabulary padding in {side} ({reason})")
    entries = int(config_fewer.get("vocab") or config_more.get("vocab") or 0)
    known = f"the vocabulary has {entries} entries" if entries else "--vocab N says so"
    says = f"no metadata says that they are padding ({known})"
    return replace(pair, rest=f"{more - fewer} rows more in {side}: rows {fewer} to {more - 1} are only in {side}, and {says}")


def _embedding_of(key: str) -> str:
    """Return the key of the embedding that a head may be tied to; nothing for what is no head."""
    name, mark, slot = key.partition("#")
    return f"embedding.word.weight{mark}{slot}" if name == "output.weight" else ""


def _common_box(x: LogicalTensor, y: LogicalTensor) -> Rectangle | None:
    zero = origin(len(x.shape))
    if x.shape == y.shape:
        return Rectangle(zero, x.shape)
    if not (x.vocabulary and y.vocabulary and x.shape[1:] == y.shape[1:] and len(x.shape) == len(y.shape)):
        return None
    return Rectangle(zero, (min(x.shape[0], y.shape[0]), *x.shape[1:]))
