"""Where a Megatron rank's local tensor stands in the whole model: pure geometry.

Sources: the partition dimensions that megatron-core gives its parameters (ColumnParallelLinear 0, RowParallelLinear 1,
VocabParallelEmbedding 0); a gated fc1 holds this rank's gate rows and then its up rows; grouped experts lie in one matrix
`weight1` [hidden, experts · rows] that is seen as [experts, hidden, rows] by the layer, `weight2` [experts · rows, hidden]
likewise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainprobe.ckpt_compare.pieces import LogicalTensor, Piece, Reshaped, Source, Turned, flat_pieces, window
from trainprobe.engine.geometry.rectangles import Point

_VOCABULARY = re.compile(r".*(word_embeddings|output_layer|lm_head)\.(weight|bias)$")
_GATED = re.compile(r".*(linear_fc1|dense_h_to_4h)\.(weight|bias)$")
_COLUMN = re.compile(
    r".*(linear_qkv|query_key_value|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|query|key_value|linear_q|linear_kv|eh_proj)\.(weight|bias)$"
)
_ROW = re.compile(r".*(linear_proj|linear_fc2|dense_4h_to_h|self_attention\.dense)\.weight$")
_DOWN = re.compile(r".*linear_(q|kv)_down_proj\.weight$")
_GROUPED = re.compile(r"(?P<head>.*\.experts)\.weight(?P<n>[12])$")
_TE_GROUPED = re.compile(r"(?P<head>.*\.experts)\.(?P<fc>linear_fc[12])\.(?P<kind>weight|bias)(?P<e>\d+)$")


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank on the tensor, pipeline and expert axes, with the sizes of those that cut tensors.

    etp_size: tensor parallel size of experts, 0 where it is that of everything else.
    """

    tp: int
    tp_size: int
    pp: int = 0
    ep: int = 0
    ep_size: int = 1
    etp_size: int = 0

    def of(self, name: str) -> Ranks:
        """Return where this rank stands for a parameter: experts may be cut over fewer tensor ranks than the rest."""
        if not self.etp_size or ".experts." not in name:
            return self
        return replace(self, tp=self.tp % self.etp_size, tp_size=self.etp_size)


@dataclass(frozen=True, slots=True)
class Local:
    """A tensor as one rank holds it, under its name in the whole model.

    shape: of the parameter it belongs to. start: for a flat range of the local tensor (distributed optimizer), its first
    element.
    """

    name: str
    source: Source
    where: str
    slot: str = ""
    chunk: int = 0
    start: int | None = None
    shape: Point | None = None

    @property
    def local_shape(self) -> Point:
        """Shape of the whole local parameter."""
        return self.shape if self.shape is not None else self.source.shape


def place(local: Local, ranks: Ranks, config: Mapping[str, Any]) -> list[LogicalTensor]:
    """Return the tensors of the whole model that a local tensor is a part of, each with this rank's pieces."""
    ranks = ranks.of(local.name)
    grouped = _GROUPED.fullmatch(local.name)
    if grouped is not None:
        return list(_grouped(local, grouped["head"], int(grouped["n"]), ranks, config))
    single = _TE_GROUPED.fullmatch(local.name)
    if single is not None:
        per_rank = int(config.get("experts_per_rank") or 0) or _te_experts(config, ranks)
        e = int(single["e"]) + ranks.ep * per_rank
        local = replace(local, name=f"{single['head']}.local_experts.{e}.{single['fc']}.{single['kind']}")
    return [_one(local, ranks, config)]


def _te_experts(config: Mapping[str, Any], ranks: Ranks) -> int:
    return int(config.get("experts") or 0) // ranks.ep_size


def _one(local: Local, ranks: Ranks, config: Mapping[str, Any]) -> LogicalTensor:
    shape, size = local.local_shape, ranks.tp_size
    axis = 0 if _down_is_cut(local.name, shape, ranks, config) else axis_of(local.name, shape)
    replica = "" if axis is not None or size == 1 else f"tp {ranks.tp}"
    boxes = _local_pieces(local, replica)
    if axis is None:
        return LogicalTensor(local.name, shape, tuple(boxes), local.slot)
    whole = (*shape[:axis], shape[axis] * size, *shape[axis + 1 :])
    if _GATED.fullmatch(local.name) and config.get("gated"):
        pieces = tuple(p for box in boxes for p in _halves(box, shape[0], ranks))
    else:
        pieces = tuple(_shift(box, axis, ranks.tp * shape[axis]) for box in boxes)
    return LogicalTensor(local.name, whole, pieces, local.slot)


def _down_is_cut(name: str, shape: Point, ranks: Ranks, config: Mapping[str, Any]) -> bool:
    """Tell whether a down projection of multi-latent attention is cut: in local layers it is, in TransformerEngine's not."""
    match = _DOWN.fullmatch(name)
    return match is not None and shape[0] * ranks.tp_size == config.get(f"{match[1]}_down_rows")


def axis_of(name: str, shape: Point) -> int | None:
    """Return the axis that tensor parallelism cuts, None for what every rank holds."""
    if _VOCABULARY.fullmatch(name) or _COLUMN.fullmatch(name) or _GATED.fullmatch(name):
        return 0
    return 1 if _ROW.fullmatch(name) and len(shape) == 2 else None


def _local_pieces(local: Local, replica: str) -> list[Piece]:
    """Return the rectangles of the local parameter that its source fills: one, or those of a flat range."""
    shape = local.local_shape
    if local.start is None:
        return [Piece((0,) * len(shape), local.source, local.where, replica)]
    return list(flat_pieces(shape, local.start, local.source, local.where, replica))


def _shift(piece: Piece, axis: int, by: int) -> Piece:
    return replace(piece, offset=(*piece.offset[:axis], piece.offset[axis] + by, *piece.offset[axis + 1 :]))


def _halves(piece: Piece, rows: int, ranks: Ranks) -> Iterator[Piece]:
    """Move this rank's gate rows and up rows to their halves of the whole fc1."""
    half = rows // 2
    for h in (0, 1):
        lo, hi = max(piece.offset[0], h * half), min(piece.offset[0] + piece.shape[0], (h + 1) * half)
        if lo < hi:
            cut = (slice(lo - piece.offset[0], hi - piece.offset[0]), *(slice(0, n) for n in piece.shape[1:]))
            row = h * half * ranks.tp_size + ranks.tp * half + lo - h * half
            yield replace(piece, offset=(row, *piece.offset[1:]), source=window(piece.source, cut))


def _grouped(local: Local, head: str, n: int, ranks: Ranks, config: Mapping[str, Any]) -> Iterator[LogicalTensor]:
    """Take one matrix of grouped experts apart into the fc1 or fc2 of each expert, [output, input] as everywhere else."""
    hidden = int(config["hidden"])
    shape = local.local_shape
    rows = int(config.get("moe_ffn") or 0) * (2 if config.get("gated") and n == 1 else 1) // ranks.tp_size
    experts = shape[1 if n == 1 else 0] // rows
    seen = (hidden, rows) if n == 1 else (rows, hidden)
    size = hidden * rows
    for e in range(experts):
        name = f"{head}.local_experts.{e + ranks.ep * experts}.linear_fc{n}.weight"
        flat = Reshaped(local.source, (shape[0] * shape[1],))
        if local.start is not None:
            raise NotImplementedError  # pragma: no cover  (callers give whole tensors for grouped experts)
        part = window(flat, (slice(e * size, (e + 1) * size),))
        yield _one(Local(name, Turned(Reshaped(part, seen), (1, 0)), local.where, local.slot), ranks, config)
