"""The layouts in which quantised weights are written, and the tensors of a checkpoint that make one weight together.

FP8 and int8 codes with scales of blocks, rows or tensors (DeepSeek-V3, compressed-tensors, ModelOpt, LLM.int8); packed
integers of compressed-tensors, GPTQ and AWQ; bitsandbytes' NF4 and FP4; MXFP4 and NVFP4; torchao's 8 bits. Bits are
packed as a little-endian stream unless a layout says otherwise. What each writer does was held against the writer's own
library (docs/ckpt_compare.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Problem, Source, Turned, bottom, whole
from trainprobe.ckpt_compare.quantised import MISFITS, Quantised, Undecoded, scheme_of
from trainprobe.ckpt_compare.quantised_codes import Blockwise, EightBits, Fp4, Grouped, PackedIntegers
from trainprobe.engine.core.words import counted
from trainprobe.engine.geometry.rectangles import Point
from trainprobe.errors import FormatError

LONGEST = 1 << 16  # bytes of a description, elements of a block
_EIGHT_BITS = {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8"}


Made = tuple[type[Quantised], str, Point, dict[str, Any]]  # kind, scheme, shape of the values, what decoding needs
Parts = Mapping[str, Source]


def _eight_bits(parts: Parts, config: Mapping[str, Any]) -> Made:
    codes = parts["codes"]
    options = {"block": config.get("weight_block_size"), "over": 127 if "kind" in parts else 1}
    return EightBits, f"{codes.format.name} with scales", codes.shape, options


def _packed(parts: Parts, config: Mapping[str, Any]) -> Made:
    codes = parts["codes"]
    if codes.format.name != "int32":
        return _fp4(parts, config, divide=True)
    shape = tuple(int(n) for n in parts["size"].load()[:2])
    bits = codes.shape[1] * 32 // shape[1]
    if -(-shape[1] * bits // 32) != codes.shape[1]:
        raise FormatError(f"{codes.shape[1]} words do not hold {shape[1]} codes")
    return PackedIntegers, f"compressed-tensors {bits} bits", shape, {"bits": bits}


def _grouped(parts: Parts, config: Mapping[str, Any]) -> Made:
    codes, zeros = parts["codes"].shape, parts["zeros"].shape
    awq = codes[1] == zeros[1]
    out = codes[1] * (8 if awq else 1)
    bits = zeros[1] * 32 // out
    fit = bits in (2, 3, 4, 8) and ("scales" not in parts or parts["scales"].shape == (zeros[0], out))
    other = config.get("quant_method") == "awq" and str(config.get("version", "gemm")).lower() != "gemm"
    if other or not fit:
        raise FormatError(f"codes of shape {list(codes)} and zero points of shape {list(zeros)} are of no known version")
    options = {"awq": awq, "bits": bits, "second": config.get("checkpoint_format") == "gptq_v2"}
    return Grouped, f"{'AWQ' if awq else 'GPTQ'} {bits} bits", (out, codes[0] if awq else codes[0] * 32 // bits), options


def _blockwise(parts: Parts, config: Mapping[str, Any]) -> Made:
    state = parts.get("state") or parts["state_fp4"]
    options = json.loads(state.load().reshape(-1)[:LONGEST].tobytes())
    if not all(type(n) is int and 0 < n <= LONGEST for k, n in options.items() if k.endswith("blocksize")):
        raise FormatError("its blocks have no size")
    return Blockwise, f"bitsandbytes {options['quant_type']}", tuple(options["shape"]), options


def _fp4(parts: Parts, config: Mapping[str, Any], *, divide: bool = False) -> Made:
    codes = parts["codes"].shape
    inner = (codes[-2] * codes[-1],) if len(codes) == 4 else codes[-1:]  # gpt-oss: [expert, out, groups, 16 bytes]
    shape = (*codes[: -2 if len(codes) == 4 else -1], 2 * inner[0])
    return Fp4, "NVFP4" if parts["scales"].format.name == "float8_e4m3fn" else "MXFP4", shape, {"divide": divide}


def _undecoded(parts: Parts, config: Mapping[str, Any]) -> Made:
    raise FormatError("its tensors say neither bits nor groups")


@dataclass(frozen=True, slots=True)
class _CodeLayout:
    """How one layout is found: the ending of its codes, the endings of what goes with them, and how the weight is called."""

    name: str
    codes: str
    weight: str
    parts: Mapping[str, str]
    make: Callable[[Parts, Mapping[str, Any]], Made]
    needs: tuple[str, ...] = ("scales",)


_LAYOUTS = (
    _CodeLayout("compressed-tensors", ".weight_packed", ".weight", {"scales": ".weight_scale", "zeros": ".weight_zero_point",
            "groups": ".weight_g_idx", "size": ".weight_shape", "whole": ".weight_global_scale"}, _packed),
    _CodeLayout("gptq", ".qweight", ".weight", {"scales": ".scales", "zeros": ".qzeros", "groups": ".g_idx"}, _grouped,
            ("zeros", "scales")),
    _CodeLayout("mxfp4", "_blocks", "", {"scales": "_scales"}, _fp4),
    _CodeLayout("bitsandbytes", ".weight", ".weight", {"scales": ".weight.absmax", "table": ".weight.quant_map",
            "nested": ".weight.nested_absmax", "nested_table": ".weight.nested_quant_map",
            "state": ".weight.quant_state.bitsandbytes__nf4", "state_fp4": ".weight.quant_state.bitsandbytes__fp4"}, _blockwise,
            ("table", "scales")),
    _CodeLayout("nvfp4", ".weight", ".weight", {"scales": ".weight_scale", "whole": ".weight_scale_2"}, _fp4),
    _CodeLayout("llm.int8", ".weight", ".weight", {"scales": ".SCB", "kind": ".weight_format"}, _eight_bits),
    _CodeLayout("quanto", ".weight._data", ".weight", {"scales": ".weight._scale"}, _eight_bits),
    _CodeLayout("quanto, 2 or 4 bits", ".weight._data._data", ".weight",
            {"scales": ".weight._scale", "zeros": ".weight._shift"}, _undecoded),
    _CodeLayout("torchao", ".weight.qdata", ".weight", {"scales": ".weight.scale", "zeros": ".weight.zero_point"}, _eight_bits),
    _CodeLayout("torchao", "._weight_qdata", ".weight", {"scales": "._weight_scale", "zeros": "._weight_zero_point"},
            _eight_bits),
    _CodeLayout("torchao, packed", ".weight.qdata", ".weight",
            {"scales": ".weight.scale", "zeros": ".weight.zero_point"}, _undecoded),
    _CodeLayout("torchao, packed", "._weight_qdata", ".weight",
            {"scales": "._weight_scale", "zeros": "._weight_zero_point"}, _undecoded),
    _CodeLayout("fp8", "", "", {"scales": "_scale_inv"}, _eight_bits),
    _CodeLayout("8 bits", "", "", {"scales": "_scale", "zeros": "_zero_point"}, _eight_bits),
)  # fmt: skip
_CODES = {
    "compressed-tensors": {"int32", "uint8"}, "gptq": {"int32"}, "mxfp4": {"uint8"}, "bitsandbytes": {"uint8"},
    "nvfp4": {"uint8"}, "llm.int8": {"int8"}, "quanto": _EIGHT_BITS, "quanto, 2 or 4 bits": {"uint8"},
    "torchao": _EIGHT_BITS, "torchao, packed": {"int32", "uint8"},
    "fp8": _EIGHT_BITS, "8 bits": _EIGHT_BITS,
}  # fmt: skip
_STORED = {"int32", "uint8", *_EIGHT_BITS}
_ACTIVATIONS = (".input_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale", ".output_scale")


def decoded(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """Return a checkpoint with its quantised weights as the values that they stand for; what goes with them is left out.

    other: the side that it will be compared with. Codes that cannot be decoded stay as they are where it holds them too.
    """
    if not any(t.stored and t.format.name in _STORED for t in checkpoint.tensors.values()):
        return checkpoint
    held = {t.name: t for t in checkpoint.tensors.values() if not t.slot}
    config: Mapping[str, Any] = checkpoint.config.get("quantisation") or {}
    made: dict[str, LogicalTensor] = {}
    used: set[str] = set()
    problems: list[Problem] = []
    for layout, stem, found in _groups(held):
        names = {held[name].name for name in found.values()}
        if names & used:
            continue
        weight = stem + layout.weight
        file, stored = held[found["codes"]].pieces[0].file, found["codes"]
        try:
            source, lacks = _source(layout, {role: _whole(held[name]) for role, name in found.items()}, config, stem)
        except (FormatError, *MISFITS) as error:
            if names <= {t.name for t in other.tensors.values()}:
                continue
            codes = held[found["codes"]]
            source, lacks = Undecoded(f"{layout.name}: {error}", codes.shape, codes.format), ""
        if lacks:
            problems.append(Problem(lacks, f"is missing: the scales of {weight}"))
        used |= names
        made[weight] = whole(weight, source, file, stored=stored)
    if not made:
        return checkpoint
    kept_too = any(t.name.endswith(_ACTIVATIONS) for t in other.tensors.values())
    also = set() if kept_too else {k for k in held if k.endswith(_ACTIVATIONS)}
    used |= also
    kept = {k: t for k, t in checkpoint.tensors.items() if t.slot or t.name not in used}
    read = [scheme_of(t) for t in made.values() if not isinstance(bottom(t.pieces[0].source), Undecoded)]
    notes = (
        [
            f"{counted(len(read), 'weight')} {'is' if len(read) == 1 else 'are'} quantised ({', '.join(sorted(set(read)))}): "
            "compared by the values that they stand for"
        ]
        if read
        else []
    )
    if also:
        notes.append(f"{len(also)} scales of activations are left out, such as {min(also)}: they are no part of a weight")
    return replace(
        checkpoint,
        tensors={**kept, **made},
        problems=(*checkpoint.problems, *problems),
        notes=(*checkpoint.notes, *notes),
    )


def _groups(held: Mapping[str, LogicalTensor]) -> Iterator[tuple[_CodeLayout, str, dict[str, str]]]:
    """Yield each layout, the stem of a weight and role → name of what is stored of it."""
    small = {k: t.format.name for k, t in held.items() if t.stored and t.format.name in _STORED}
    for layout in _LAYOUTS:
        groups: list[tuple[str, dict[str, str]]] = []
        for name, fmt in small.items():
            if name.endswith(layout.codes) and fmt in _CODES[layout.name]:
                stem = name[: len(name) - len(layout.codes)]
                parts = {role: stem + ending for role, ending in layout.parts.items() if stem + ending in held}
                groups.append((stem, {"codes": name, **parts}))
        sure = layout.codes in (".weight_packed", ".qweight")
        if sure or any(len(parts) > 1 for _, parts in groups):
            alike = {_kind(parts["codes"], small) for _, parts in groups if len(parts) > 1}
            for stem, parts in groups:
                if sure or len(parts) > 1 or _kind(parts["codes"], small) in alike:
                    yield layout, stem, parts


def _kind(name: str, formats: Mapping[str, str]) -> tuple[str, str]:
    return name.rpartition(".")[2], formats[name]


def _whole(tensor: LogicalTensor) -> Source:
    if len(tensor.pieces) != 1 or tensor.pieces[0].shape != tensor.shape:
        raise FormatError("its parts lie in several files")
    return tensor.pieces[0].source


def _source(layout: _CodeLayout, parts: dict[str, Source], config: Mapping[str, Any], stem: str) -> tuple[Source, str]:
    """Return the decoded weight, and the name of scales that are missing; raise FormatError where parts do not fit."""
    lost = [layout.parts[role] for role in layout.needs if role not in parts]
    if lost and lost[0] != layout.parts["scales"]:
        raise FormatError(f"{stem}{lost[0]} is missing")
    codes = parts["codes"]
    kind, scheme, shape, options = layout.make(parts, config)
    if scheme == "NVFP4" and "whole" not in parts:
        lost = [layout.parts["whole"]]
    most = 8 * math.prod(codes.shape) * codes.format.itemsize
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) > most:
        raise FormatError(f"there are not as many codes as a shape of {list(shape)} has elements")
    lacks = f"{stem}{lost[0]}" if lost else ""
    scales = f"{stem}{layout.parts['scales']}".rpartition(".")[2]
    made = kind(scheme, shape, parts, options, lacks, scales)
    if math.prod(shape):
        made.part((slice(0, 1), *(slice(0, n) for n in shape[1:])))  # whether everything fits
    return (Turned(made, (0, 2, 1)) if len(codes.shape) == 4 else made), lacks  # transformers: [expert, in, out]


def hide_codes(
    mine: Mapping[str, LogicalTensor], others: Mapping[str, LogicalTensor], config: Mapping[str, Any]
) -> Mapping[str, LogicalTensor]:
    """Return tensors in which what is stored of a weight in an unknown format stands as one that cannot be compared.

    That is a weight which the other side holds, and this side as several tensors, some of them integers.
    """
    method = str((config.get("quantisation") or {}).get("quant_method", "unknown format"))
    groups: dict[str, list[str]] = {}
    for key in (k for k in mine if k not in others):
        groups.setdefault(key.rpartition(".")[0].removesuffix(".weight"), []).append(key)
    hidden: dict[str, LogicalTensor] = {}
    gone: set[str] = set()
    for base, keys in groups.items():
        key = f"{base}.weight"
        whole_numbers = [mine[k] for k in keys if mine[k].stored and mine[k].format.mantissa is None and mine[k].count > 1]
        if key in others and key not in mine and whole_numbers:
            codes = whole_numbers[0]
            hidden[key] = whole(
                key, Undecoded(method, others[key].shape, codes.format), codes.pieces[0].file, stored=codes.native
            )
            gone |= set(keys)
    return {**{k: t for k, t in mine.items() if k not in gone}, **hidden} if hidden else mine
