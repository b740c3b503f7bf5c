"""Quantised weights by the libraries that write them: what they store for one weight, and what they themselves make of it.

A writer that is not installed is left out (`pip install compressed-tensors bitsandbytes autoawq`). GPTQ packs as AutoGPTQ's
`QuantLinear.pack` does, 3 bits included; FP8 blocks are those of transformers' finegrained_fp8.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

Parts = dict[str, torch.Tensor]
Stored = tuple[Parts, torch.Tensor, dict[str, Any]]  # by what follows the module's name, dequantised, quantization_config
GROUP = 32


def fp8_blocks(weight: torch.Tensor) -> Stored:
    """Store FP8 codes and the scales of 128 × 128 blocks, as DeepSeek-V3 is published; the last blocks may be smaller."""
    rows, columns = weight.shape
    grid = [-(-n // 128) for n in weight.shape]
    padded = torch.zeros(grid[0] * 128, grid[1] * 128)
    padded[:rows, :columns] = weight
    scale = padded.view(grid[0], 128, grid[1], 128).abs().amax((1, 3)) / 448
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    code = (weight / full).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return {"weight": code, "weight_scale_inv": scale}, code.float() * full, config


def fp8_tensor(weight: torch.Tensor) -> Stored:
    """Store FP8 codes with one scale, and the scale of the activations, as TensorRT's ModelOpt and static FP8 do."""
    scale = weight.abs().amax() / 448
    code = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": code, "weight_scale": scale, "input_scale": torch.tensor(0.013)}
    return parts, code.float() * scale, {"quant_method": "modelopt", "quant_algo": "FP8"}


def compressed(weight: torch.Tensor, kind: str) -> Stored:
    """Let compressed-tensors quantise and dequantise."""
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    shape: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "int4": ("PackedQuantizationCompressor", shape),
        "int4 asymmetric": ("PackedQuantizationCompressor", {**shape, "symmetric": False}),
        "int8": ("IntQuantizationCompressor", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        "fp8": ("FloatQuantizationCompressor", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "mxfp8": ("MXFP8QuantizationCompressor", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
        "nvfp4": ("NVFP4PackedCompressor", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    }
    name, args = asked[kind]
    compressor: Any = getattr(compressors, name)
    made = QuantizationArgs(**args)
    width = args.get("group_size", weight.shape[1])
    groups = weight.reshape(weight.shape[0], -1, width)
    if kind == "nvfp4":
        whole = (448 * 6 / weight.abs().max()).reshape(1)
        scale = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn).float()
        held = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    elif kind == "mxfp8":
        held = {"weight": weight, "weight_scale": torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1) / 448)))}
    else:
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), made)
        held = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=made)
    parts: Parts = compressor.compress(held, scheme)
    if made.symmetric:
        parts.pop("weight_zero_point", None)
    back: Any = compressor.decompress(dict(parts), scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": _format(kind), "config_groups": {"group_0": {"weights": args}}}
    return {k: v.detach() for k, v in parts.items()}, back.detach().float(), config


def _format(kind: str) -> str:
    return {"int8": "int-quantized", "fp8": "float-quantized", "mxfp8": "mxfp8-quantized", "nvfp4": "nvfp4-pack-quantized"}.get(
        kind, "pack-quantized"
    )


def bitsandbytes(weight: torch.Tensor, kind: str, nested: bool) -> Stored:
    """Let bitsandbytes quantise to 4 bits, and dequantise, on the CPU."""
    import bitsandbytes.functional as bnb

    code, state = bnb.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
    parts = {"weight": code, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return parts, bnb.dequantize_4bit(code, state).float(), config


def llm_int8(weight: torch.Tensor) -> Stored:
    """Store what LLM.int8 does: codes and the largest value of each row (SCB)."""
    largest = weight.abs().amax(1)
    code = (weight * (127 / largest)[:, None]).round().to(torch.int8)
    parts = {"weight": code, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, code.float() * (largest / 127)[:, None], {"quant_method": "bitsandbytes", "load_in_8bit": True}


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes along the first axis into a stream of bits, 32 a word (AutoGPTQ, `QuantLinear.pack`)."""
    rows = codes.shape[0]
    words = torch.zeros(rows * bits // 32 + 1, codes.shape[1], dtype=torch.int64)
    for row in range(rows):
        word, shift = divmod(row * bits, 32)
        words[word] |= codes[row].long() << shift
        if shift + bits > 32:
            words[word + 1] |= codes[row].long() >> (32 - shift)
    words = words[:-1] & 0xFFFFFFFF
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def grouped(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [in, out], scales and zeros [groups, out] of asymmetric groups along the input."""
    groups = weight.t().reshape(-1, GROUP, weight.shape[0])
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = (-low / scale).round()
    codes = (groups / scale[:, None] + zero[:, None]).round().clamp(0, 2**bits - 1)
    return codes.reshape(weight.shape[1], -1), scale, zero


def gptq(weight: torch.Tensor, bits: int, by_activation: bool = False, version: int = 1) -> Stored:
    """Store GPTQ's layout: zeros one less than they are (version 1), groups by `g_idx` where the columns were reordered."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5)) if by_activation else None
    codes, scale, zero = grouped(weight[:, order] if order is not None else weight, bits)
    group = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    if order is not None:
        back = torch.argsort(order)
        codes, group = codes[back], group[back]
    zero = zero.clamp(min=1) if version == 1 else zero
    value = ((codes - zero[group.long()]) * scale[group.long()]).t()
    parts = {
        "qweight": packed(codes, bits),
        "qzeros": packed((zero - int(version == 1)).t(), bits).t().contiguous(),
        "scales": scale.half(),
        "g_idx": group,
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": by_activation, "sym": False}
    return parts, value, config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})


def awq(weight: torch.Tensor) -> Stored:
    """Let AutoAWQ pack, and dequantise."""
    spec: Any = find_spec("awq")
    package = ModuleType("awq")  # its __init__ imports what calibrates, data sets included
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules["awq"] = package
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    codes, scale, zero = grouped(weight, 4)
    group = torch.arange(weight.shape[1]) // GROUP
    linear: Any = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = ((codes - zero[group]) * scale[group]).t().contiguous()  # as AutoAWQ's own quantiser leaves it
    made: Any = WQLinear_GEMM.from_linear(linear, 4, GROUP, False, scale, zero)
    value = dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, GROUP).t()
    parts = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}
    return parts, value, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def available() -> dict[str, Callable[[torch.Tensor], Stored]]:
    """Return the writers that can run here."""
    made: dict[str, Callable[[torch.Tensor], Stored]] = {
        "FP8 blocks": fp8_blocks,
        "FP8 tensor": fp8_tensor,
        "LLM.int8": llm_int8,
        "GPTQ 4": lambda w: gptq(w, 4),
        "GPTQ 3": lambda w: gptq(w, 3),
        "GPTQ 8 by activation": lambda w: gptq(w, 8, by_activation=True),
        "GPTQ 4, version 2": lambda w: gptq(w, 4, version=2),
    }
    if find_spec("compressed_tensors"):
        for kind in ("int4", "int4 asymmetric", "int8", "fp8", "mxfp8", "nvfp4"):
            made[f"compressed-tensors {kind}"] = lambda w, k=kind: compressed(w, k)
    if find_spec("bitsandbytes"):
        for kind, nested in (("nf4", False), ("nf4", True), ("fp4", False)):
            made[f"bitsandbytes {kind}{' nested' if nested else ''}"] = lambda w, k=kind, n=nested: bitsandbytes(w, k, n)
    if find_spec("awq"):
        made["AWQ"] = awq
    return made


def described(config: dict[str, Any]) -> str:
    """Return the config.json of a small Llama with a quantization_config."""
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    quantised = {"quantization_config": config} if config else {}
    return json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 64} | shape | quantised)
