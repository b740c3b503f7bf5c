"""What a model holds, under the names and in the parts that each tensor has everywhere (see `engine.model_names`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainprobe.engine.core.held_parameters import members, shards_of
from trainprobe.engine.core.naming import count_outer_wrappers, logical_name
from trainprobe.engine.core.sources import Source
from trainprobe.engine.geometry.fused_rows import Band, bands_of, rows_of_qkv
from trainprobe.engine.geometry.shards import Shard, mesh_shard
from trainprobe.engine.model_names import ADAPTER, NameMap, built_in

Config = Mapping[str, Any]


class HeldPiece(NamedTuple):
    """A rectangle of a logical tensor that this process holds. base: the same without its adapter, where it has one."""

    name: str
    tensor: Any
    shard: Shard
    vocabulary: bool = False
    base: Any = None


def config_of(model: Any, given: Config | None = None) -> dict[str, Any]:
    """Return heads, groups and head_dim of a model of transformers, or as given."""
    held = getattr(model, "config", None)
    heads = getattr(held, "num_attention_heads", None)
    hidden = getattr(held, "hidden_size", None)
    found = {
        "heads": heads,
        "groups": getattr(held, "num_key_value_heads", None) or heads,
        "head_dim": getattr(held, "head_dim", None) or (hidden // heads if heads and hidden else None),
        "gated": True,
    }
    return found | dict(given or {})


def held_pieces(model: Any, source: Source | None = None, config: Config | None = None) -> Iterator[HeldPiece]:
    """Yield what this process holds of a model, each logical tensor split into what other families of models hold.

    source: where a framework keeps its parameters; without one the parameters of the modules, FSDP2's and other DTensors by
    their local shards, and those with LoRA adapters merged as PEFT merges them.
    """
    held = list(_of_source(source) if source is not None else _of_modules(model))
    names = [name for name, *_ in held]
    family, prefix = next(((m, p) for m in built_in() if (p := m.wrapper(names)) is not None), (None, ""))
    family = None if family is None else family.of((name.removeprefix(prefix), shard.whole) for name, _, shard, _ in held)
    known = config_of(model, config)
    for name, tensor, shard, base in held:
        if family is None:
            yield HeldPiece(name, tensor, shard, base=base)
        else:
            yield from _mapped(family, family.stripped(name.removeprefix(prefix)), tensor, shard, base, known)


def _of_source(source: Source) -> Iterator[tuple[str, Any, Shard, Any]]:
    for part in source.parts("after_step"):
        if part.slot == "value":
            tensor = _local(part.tensor)
            yield part.name, tensor, part.shard or _whole(tensor), None


def _of_modules(model: Any) -> Iterator[tuple[str, Any, Shard, Any]]:
    modules = dict(model.named_modules())
    shards, outer = shards_of(modules.values()), count_outer_wrappers(filter(None, modules))
    seen: set[int] = set()
    for path, module in modules.items():
        for short, p in members(module, shards):
            name = logical_name(f"{path}.{short}", outer_wrappers=outer)
            if id(p) in seen or ADAPTER.fullmatch(name):
                continue
            seen.add(id(p))
            tensor = _local(p)
            owner = modules.get(path.removesuffix(".base_layer"))
            merged = _merged(owner, tensor) if path.endswith(".base_layer") and short == "weight" else None
            base = None if merged is None else tensor
            name = name.replace(".base_layer.", ".").removeprefix("base_model.model.")
            yield name, tensor if merged is None else merged, mesh_shard(p) or _whole(tensor), base


def _merged(layer: Any, weight: Any) -> Any:
    """Return the weight with its active LoRA adapters, by PEFT's own formula; None for another kind of layer."""
    if not hasattr(layer, "get_delta_weight") or getattr(layer, "merged", False):
        return None
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    return weight.detach()


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(tensor: Any) -> Shard:
    shape = tuple(tensor.shape)
    return Shard((0,) * len(shape), shape, shape)


def _mapped(family: NameMap, name: str, tensor: Any, shard: Shard, base: Any, config: Config) -> Iterator[HeldPiece]:
    """Yield the logical parts of one tensor; the tensor as it is where no rule knows it, or a number is not known."""
    known = family.rule_of(name, config)
    if known is None:
        yield HeldPiece(name, tensor, shard, base=base)
        return
    rule, match = known
    if rule.drop:
        return
    found: list[tuple[HeldPiece, list[int]]] = [(HeldPiece("", tensor, shard, rule.vocabulary, base), [])]
    for by in rule.by:
        parts = [(part, [*at, i]) for piece, at in found for i, part in _transformed(by, piece, config)]
        if not parts and tensor.numel():
            yield HeldPiece(name, tensor, shard, base=base)
            return
        found = parts
    for piece, at in found:
        yield piece._replace(name=rule.name_of(match, at))


def _transformed(by: str, piece: HeldPiece, config: Config) -> Iterator[tuple[int, HeldPiece]]:
    """Yield (number of the part, what is held of it) of one transform of a name map; nothing where a number is not known."""
    whole = piece.shard.whole
    if by == "same":
        yield 0, piece
    elif by == "transpose":
        yield 0, _turned(piece)
    elif by == "by_index":
        for i, part in _split(piece, 0, [Band(i, 1, i, 0) for i in range(whole[0])]):
            yield i, part._replace(tensor=part.tensor[0], base=None if part.base is None else part.base[0], shard=_inner(part))
    elif by in ("halves", "column_halves", "thirds"):
        yield from _split(piece, *bands_of(by, whole))
    elif by in ("qkv_blocks", "qkv_by_group") and all(config.get(k) for k in ("heads", "groups", "head_dim")):
        axis, bands = bands_of(by, whole, *rows_of_qkv(config))
        if sum(band.size for band in bands) == whole[axis]:
            yield from _split(piece, axis, bands)


def _split(piece: HeldPiece, axis: int, bands: Sequence[Band]) -> Iterator[tuple[int, HeldPiece]]:
    """Yield what is held of each band of one axis, at its place in its part."""
    shard = piece.shard
    begin, end = shard.offset[axis], shard.offset[axis] + shard.shape[axis]
    for band in bands:
        low, high = max(begin, band.start), min(end, band.start + band.size)
        if low >= high:
            continue
        size = sum(other.size for other in bands if other.part == band.part)
        offset = (*shard.offset[:axis], band.target + low - band.start, *shard.offset[axis + 1 :])
        shape = (*shard.shape[:axis], high - low, *shard.shape[axis + 1 :])
        whole = (*shard.whole[:axis], size, *shard.whole[axis + 1 :])
        cut = [t if t is None else t.narrow(axis, low - begin, high - low) for t in (piece.tensor, piece.base)]
        yield band.part, piece._replace(tensor=cut[0], base=cut[1], shard=Shard(offset, shape, whole, shard.replicas))


def _inner(part: HeldPiece) -> Shard:
    shard = part.shard
    return Shard(shard.offset[1:], shard.shape[1:], shard.whole[1:], shard.replicas)


def _turned(piece: HeldPiece) -> HeldPiece:
    """Return a piece with its last two axes swapped."""
    shard = piece.shard
    if len(shard.whole) < 2:
        return piece
    offset, shape, whole = ((*v[:-2], v[-1], v[-2]) for v in (shard.offset, shard.shape, shard.whole))
    tensor, base = (t if t is None else t.transpose(-1, -2) for t in (piece.tensor, piece.base))
    return piece._replace(tensor=tensor, base=base, shard=Shard(offset, shape, whole, shard.replicas))
