"""Quantised checkpoints against dequantised ones, healthy and with one thing wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.ckpt_bench.judged import Answer, judged
from benchmarks.ckpt_bench.models import State
from benchmarks.ckpt_bench.quantisers import Stored, available, described, fp8_blocks, gptq

SHAPES = {"self_attn.q_proj": (128, 128), "mlp.down_proj": (128, 192), "mlp.up_proj": (192, 128)}
SCALES = re.compile(r"(scale_inv|(?<!input_)scale|scales|absmax|SCB)$")
NEAREST = ("FP8", "LLM", "compressed-tensors", "bitsandbytes", "AWQ", "GPTQ")  # codes are the nearest ones to the weight


def weights() -> State:
    generator = torch.Generator().manual_seed(3)
    return {
        f"model.layers.{i}.{name}": 0.02 * torch.randn(shape, generator=generator)
        for i in range(2)
        for name, shape in SHAPES.items()
    }


def save(folder: Path, state: State, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file({k: v.clone().contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(described(config))
    return folder


def _coded(quantise: Callable[[torch.Tensor], Stored]) -> tuple[State, State, dict[str, Any]]:
    """Return the quantised state, the dequantised one, and the configuration."""
    coded: State = {}
    plain: State = {}
    config: dict[str, Any] = {}
    for name, weight in weights().items():
        parts, value, config = quantise(weight)
        coded |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        plain[f"{name}.weight"] = value
    return coded, plain, config


def _one(state: State, pattern: str) -> str:
    return next(k for k in sorted(state) if "layers.1.mlp.up_proj" in k and re.search(pattern, k))


def _other_code(state: State) -> bool:
    name = _one(state, r"(weight|packed|qweight)$")
    flat = state[name].clone().view(-1).view(torch.uint8)
    flat[7] ^= 2
    state[name] = flat.view(state[name].dtype).view(state[name].shape)
    return True


def _other_scale(state: State) -> bool:
    name = _one(state, SCALES.pattern)
    scale = state[name].clone()
    flat = scale.view(-1)
    if scale.dtype == torch.uint8 or flat.numel() < 2:
        return False
    flat[1] = (flat[1].float() * 1.07).to(scale.dtype)
    state[name] = scale
    return True


def _all_scales(state: State) -> bool:
    found = [k for k in state if SCALES.search(k) and state[k].dtype in (torch.float32, torch.float16)]
    for name in found:
        state[name] = (state[name].float() * 1.02).to(state[name].dtype)
    return bool(found)


def _lost_scale(state: State) -> bool:
    del state[_one(state, SCALES.pattern)]
    return True


def _zeros_off(state: State) -> bool:
    found = [k for k in state if k.endswith("qzeros")]
    for name in found:  # 4 bits
        raw = state[name].contiguous().view(torch.uint8)
        one = (((raw >> 4) + 1) % 16 << 4) | (raw % 16 + 1) % 16
        state[name] = one.view(torch.int32).view(state[name].shape)
    return bool(found)


def _no_zeros(state: State) -> bool:
    found = [k for k in state if k.endswith("weight_zero_point")]
    for name in found:
        del state[name]
    return bool(found)


def _turned_scales(state: State) -> bool:
    found = [k for k in state if k.endswith("scale_inv") and state[k].shape[0] != state[k].shape[1]]
    found += [k for k in state if k.endswith("scale_inv") and state[k].numel() > 2]
    for name in found:
        state[name] = state[name].flip(1)
    return bool(found)


def _swapped_nibbles(state: State) -> bool:
    found = [
        k for k in state if k.endswith(("weight", "weight_packed", "qweight")) and state[k].dtype in (torch.uint8, torch.int32)
    ]
    for name in found:
        raw = state[name].contiguous().view(torch.uint8)
        state[name] = ((raw >> 4) | (raw << 4)).view(state[name].dtype).view(state[name].shape)
    return bool(found)


PLANTED: dict[str, tuple[Callable[[State], bool], str]] = {
    "one code": (_other_code, r"differ: .*1 of \d+ tensors.*up"),
    "one scale × 1.07": (_other_scale, r"differ: .*1 of \d+ tensors.*up"),
    "all scales × 1.02": (_all_scales, r"differ: .*1\.02 times|0\.98 times"),
    "a scale lost": (_lost_scale, r"(scale|absmax|SCB).*(missing|lost|only in|without)"),
    "zeros off by one": (_zeros_off, r"differ: .*zero"),
    "zero points left out": (_no_zeros, r"differ: .*zero"),
    "blocks' scales in another order": (_turned_scales, r"differ: "),
    "nibbles exchanged": (_swapped_nibbles, r"differ: .*(nibble|order)"),
}


def _raw(coded: State) -> State | None:
    """Return the codes of 8 bits as if they were the weights."""
    names = [k for k in coded if k.endswith(".weight") and coded[k].dtype in (torch.float8_e4m3fn, torch.int8)]
    return {k: coded[k].float().bfloat16() for k in names} or None


def coded_pairs(folder: Path) -> Iterator[Answer]:
    """Yield the answers for each writer of quantised weights, and of two formats that are not decoded."""
    for number, (writer, quantise) in enumerate(available().items()):
        coded, plain, config = _coded(quantise)
        here = folder / writer
        a = save(here / "coded", coded, config)
        dtype = torch.float16 if "GPTQ" in writer or "AWQ" in writer else torch.bfloat16
        pairs = {"dequantised": ({k: v.to(dtype) for k, v in plain.items()}, (0, 1))}
        if any(not torch.equal(v, v.bfloat16().float()) for v in plain.values()):  # of NVFP4 the writer gives bfloat16
            pairs["dequantised float32"] = (plain, (0, 1))
        if writer.startswith(NEAREST):
            pairs["the original"] = ({f"{k}.weight": v for k, v in weights().items()}, (1,))
        for name, (state, codes) in pairs.items():
            found = judged(a, save(here / name, state, {}))
            yield Answer(writer, name, "", found.code in codes, found.sentence)
        found = judged(a, save(here / "again", coded, config))
        yield Answer(writer, "again", "", found.code == 0, found.sentence)
        raw = _raw(coded)
        if raw is not None:
            found = judged(a, save(here / "raw", raw, {}))
            yield Answer(
                writer,
                "raw",
                "scales left out",
                found.code == 2 and bool(re.search(r"without .*(scale|SCB)|(scale|SCB).* left out", found.sentence)),
                found.sentence,
            )
        factor = {k: (v * 1.03).to(dtype) for k, v in plain.items()}
        found = judged(a, save(here / "factor", factor, {}))
        yield Answer(
            writer, "dequantised", "weights × 1.03", found.code == 2 and "1.03 times" in found.sentence, found.sentence
        )
        whole = weights()
        near = {k: v + 0.2 * (whole[k.removesuffix(".weight")] - v) for k, v in plain.items()}
        found = judged(a, save(here / "near", near, {}))
        yield Answer(writer, "float32", "a fifth of the way to the original", found.code == 2, found.sentence)
        for place, (cause, (plant, pattern)) in enumerate(PLANTED.items()):
            state = dict(coded)
            if re.search("GPTQ [38]", writer) and cause in ("zeros off by one", "nibbles exchanged"):
                continue  # for layouts of 4 bits
            if cause == "all scales × 1.02" and "nested" in writer:
                pattern = "differ: "  # an offset that is no multiple is added to the scales
            if plant(state):
                other = save(here / f"{place}", state, config)
                b = a if (place + number) % 2 else save(here / f"{place}-b", {k: v.to(dtype) for k, v in plain.items()}, {})
                found = judged(other, b)
                yield Answer(
                    writer,
                    "coded" if b is a else "dequantised",
                    cause,
                    found.code > 1 and bool(re.search(pattern, found.sentence)),
                    found.sentence,
                )
    yield from _not_decoded(folder / "not decoded")
    yield from _other_places(folder / "places")


def _not_decoded(folder: Path) -> Iterator[Answer]:
    """Yield the answers for formats that are not read: never healthy against weights, identical against themselves."""
    plain = {f"{k}.weight": v.bfloat16() for k, v in weights().items()}
    aqlm: State = {}
    hqq: State = {}
    quanto: State = {}
    marlin: State = {}
    for name in weights():
        aqlm |= {
            f"{name}.codes": torch.randint(-128, 127, (16, 16, 2), dtype=torch.int8),
            f"{name}.codebooks": torch.randn(2, 256, 1, 8).half(),
            f"{name}.scales": torch.rand(16, 1, 1, 1).half(),
        }
        hqq |= {
            f"{name}.W_q": torch.randint(0, 255, (64, 64), dtype=torch.uint8),
            f"{name}.scale": torch.rand(128, 1).half(),
            f"{name}.zero": torch.rand(128, 1).half(),
            f"{name}.nbits": torch.tensor(4),
        }
        quanto |= {
            f"{name}.weight._data._data": torch.randint(0, 255, (128, 32), dtype=torch.uint8),
            f"{name}.weight._scale": torch.rand(256, 1).half(),
            f"{name}.weight._shift": torch.rand(256, 1).half(),
            f"{name}.input_scale": torch.tensor(1.0),
            f"{name}.output_scale": torch.tensor(1.0),
        }
        marlin |= {
            f"{name}.B": torch.randint(-999, 999, (8, 256), dtype=torch.int32),
            f"{name}.s": torch.rand(1, 128).half(),
        }
    for kind, state in (("aqlm", aqlm), ("hqq", hqq), ("quanto", quanto), ("marlin", marlin)):
        a = save(folder / kind, state, {"quant_method": kind})
        found = judged(a, save(folder / f"{kind} plain", plain, {}))
        good = found.code == 3 and bool(re.search(rf"quantised \({kind}\b[^)]*\), not compared", found.sentence))
        yield Answer(kind, "plain", "not decoded", good, found.sentence)
        found = judged(a, save(folder / f"{kind} again", state, {"quant_method": kind}))
        yield Answer(kind, "again", "", found.code == 0, found.sentence)


def _other_places(folder: Path) -> Iterator[Answer]:
    """Yield the answers for experts on one axis, fused matrices, torch files, and parts that lie in several files."""
    for cause, (a, b) in _experts().items():
        found = judged(save(folder / f"{cause}a", a, {}), save(folder / f"{cause}b", b, {}))
        yield Answer(
            "experts",
            cause,
            "a scale" if "scale" in cause else "",
            found.code == 2 if "scale" in cause else found.code < 2,
            found.sentence,
        )
    torch.manual_seed(2)
    key = "model.layers.0.self_attn."
    parts, value, config = gptq(_normal(384, 128), 4)
    fused = {f"{key}qkv_proj.{k}": v for k, v in parts.items()} | {f"{key}o_proj.weight": _normal(128, 128)}
    plain = {f"{key}qkv_proj.weight": value.half(), f"{key}o_proj.weight": fused[f"{key}o_proj.weight"]}
    source = save(folder / "fused", fused, config)
    found = judged(source, save(folder / "fused plain", plain, {}))
    yield Answer("phi", "fused", "", found.code < 2, found.sentence)
    binary = folder / "binary"
    binary.mkdir()
    torch.save(fused, binary / "pytorch_model.bin")
    (binary / "config.json").write_text(described(config))
    found = judged(binary, folder / "fused plain")
    yield Answer("phi", "torch.save", "", found.code < 2, found.sentence)
    shards = folder / "shards"
    shards.mkdir()
    index: dict[str, str] = {}
    for i, name in enumerate(sorted(fused)):
        index[name] = f"model-{i % 3}.safetensors"
    for file in set(index.values()):
        save_file({k: v.contiguous() for k, v in fused.items() if index[k] == file}, shards / file, {"format": "pt"})
    (shards / "config.json").write_text(described(config))
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = judged(shards, folder / "fused plain")
    yield Answer("phi", "shards", "", found.code < 2, found.sentence)
    for file in sorted(set(index.values())):
        kept = (shards / file).rename(folder / "away")
        found = judged(shards, folder / "fused plain")
        yield Answer(
            "phi",
            "shards",
            "a shard lost",
            found.code > 1 and (file in found.sentence or "missing" in found.sentence),
            found.sentence,
        )
        kept.rename(shards / file)


def _normal(*shape: int) -> torch.Tensor:
    return 0.02 * torch.randn(shape)


def _experts() -> dict[str, tuple[State, State]]:
    """Return FP8 experts with blocks' scales, and MXFP4 ones that transformers decodes."""
    torch.manual_seed(2)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    held = [fp8_blocks(_normal(256, 128)) for _ in range(3)]
    code, scale = (torch.stack([parts[p] for parts, _, _ in held]) for p in ("weight", "weight_scale_inv"))
    other = scale.clone()
    other[1, 1, 0] *= 1.07
    also = {"model.layers.0.self_attn.o_proj.weight": _normal(32, 32)}
    plain = also | {name: torch.stack([value for _, value, _ in held]).bfloat16()}
    found = {f"fp8{mark}": (also | {name: code, f"{name}_scale_inv": s}, plain) for mark, s in (("", scale), (" scale", other))}
    if find_spec("transformers"):
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks = torch.randint(0, 256, (2, 64, 4, 16), dtype=torch.uint8)
        scales = torch.randint(110, 125, (2, 64, 4), dtype=torch.uint8)
        value: torch.Tensor = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
        higher = scales.clone()
        higher[1, 3, 2] += 1
        for mark, s in (("", scales), (" scale", higher)):
            found[f"mxfp4{mark}"] = also | {f"{name}_blocks": blocks, f"{name}_scales": s}, also | {name: value.bfloat16()}
    return found
