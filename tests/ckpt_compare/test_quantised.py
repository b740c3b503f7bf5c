"""Quantised weights: codes, scales and zero points are one tensor, compared by the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.ckpt_bench.coded import coded_pairs
from benchmarks.ckpt_bench.judged import judged
from benchmarks.ckpt_bench.quantisers import fp8_blocks, gptq
from trainprobe.ckpt_compare.compare import logical
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.cli import main

DATA = Path(__file__).parent / "data" / "quantised"
WRITTEN = sorted(p.name.removesuffix(".values.safetensors") for p in DATA.glob("*.values.safetensors"))
NAME = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("name", WRITTEN)
def test_codes_decode_to_what_their_writer_decodes_them_to(name):
    coded = open_checkpoint(
        next(DATA / f"{name}.{kind}" for kind in ("safetensors", "pt") if (DATA / f"{name}.{kind}").exists())
    )
    values = open_checkpoint(DATA / f"{name}.values.safetensors")
    made = logical(coded, values)[0].tensors["m.proj.weight"].pieces[0].source.load()
    wanted = load_file(DATA / f"{name}.values.safetensors")["m.proj.weight"]
    exact = {"rtol": 1e-6, "atol": 0.0} if "nvfp4" not in name else {"rtol": 2**-8, "atol": 0.0}  # it decodes to bfloat16
    torch.testing.assert_close(torch.from_numpy(made.copy()), wanted, **exact)


def test_each_planted_fault_of_a_quantised_checkpoint_is_named_and_no_healthy_one_is_accused(tmp_path):
    """Case p01 is among them."""
    answers = list(coded_pairs(tmp_path))
    assert len(answers) > 80
    assert [(a.model, a.layout, a.cause, a.sentence) for a in answers if not a.good] == []


def folder(path: Path, tensors, config=None) -> Path:
    path.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return path


@pytest.fixture
def blocks(tmp_path):
    """Return a folder of FP8 codes with blocks that the last rows do not fill, its parts, and their values."""
    weight = 0.02 * torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    parts, value, config = fp8_blocks(weight)
    coded = {f"{NAME}.{k}": v for k, v in parts.items()}
    return folder(tmp_path / "coded", coded, config), parts, value


@pytest.mark.parametrize(("dtype", "most"), [(torch.int8, 127), (torch.float8_e4m3fn, 448)])
def test_eight_bits_of_quanto_are_their_codes_times_their_scales(dtype, most, tmp_path):
    weight = 0.02 * torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(1, keepdim=True) / most
    codes = weight / scale
    codes = (codes if dtype.is_floating_point else codes.round()).to(dtype)
    parts = {"weight._data": codes, "weight._scale": scale, "input_scale": torch.ones(1), "output_scale": torch.ones(1)}
    a = folder(tmp_path / "a", {f"{NAME}.{k}": v for k, v in parts.items()}, {"quant_method": "quanto"})
    for name, value, code in (("right", codes.float() * scale, 0), ("twice", 2 * codes.float() * scale, 2)):
        found = judged(a, folder(tmp_path / name, {f"{NAME}.weight": value}))
        assert found.code == code, found.sentence


@pytest.mark.parametrize("how", [".weight.{}", "._weight_{}"])
def test_packed_codes_of_torchao_are_named_and_not_compared(how, tmp_path, capsys):
    parts = {
        "qdata": torch.arange(96, dtype=torch.uint8).reshape(12, 8),
        "scale": torch.ones(12, 1),
        "zero_point": torch.ones(12, 1),
    }
    coded, plain = ({NAME + how.format(k): v for k, v in parts.items()}, {f"{NAME}.weight": torch.ones(12, 16)})
    for path, state in ((tmp_path / "a.pt", coded), (tmp_path / "b.pt", plain)):
        torch.save({**state, "bias": torch.ones(3)}, path)
    assert main(["ckpt-compare", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 3
    said = capsys.readouterr().out
    assert "1 tensor quantised (torchao, packed: its tensors say neither bits nor groups), not compared" in said.splitlines()[0]
    assert "dequantise them with the library" in said and "values that they stand for" not in said


def test_scales_that_were_left_out_are_named(blocks, tmp_path):
    raw = folder(tmp_path / "raw", {f"{NAME}.weight": blocks[1]["weight"].float().bfloat16()})
    found = judged(blocks[0], raw)
    assert found.code == 2
    assert "is the codes alone in B: their scales (weight_scale_inv) were left out" in found.sentence
    assert "is the codes alone in A: their scales (weight_scale_inv) were left out" in judged(raw, blocks[0]).sentence


def test_scales_by_which_one_side_divides_are_named(blocks, tmp_path):
    value, codes = blocks[2], blocks[1]["weight"].float()
    divided = folder(tmp_path / "divided", {f"{NAME}.weight": torch.where(value != 0, codes * codes / value, codes)})
    assert "divided by their scales (weight_scale_inv) in B, and not multiplied" in judged(blocks[0], divided).sentence


def test_a_note_says_that_values_were_compared_and_the_table_says_how_they_are_stored(blocks, tmp_path, capsys):
    plain = folder(tmp_path / "plain", {f"{NAME}.weight": blocks[2].bfloat16()})
    assert main(["ckpt-compare", str(blocks[0]), str(plain)]) == 1
    said = capsys.readouterr().out
    assert "float8_e4m3fn with scales/bfloat16" in said
    assert "1 weight is quantised (float8_e4m3fn with scales): compared by the values that they stand for" in said


def test_codes_of_one_scheme_on_both_sides_are_held_to_their_last_bit(blocks, tmp_path):
    """Half a gap is the rounding of a code against a finer number, and not of a code against another code."""
    parts = dict(blocks[1])
    flat = parts["weight"].view(torch.uint8).clone()
    flat[3, 4] ^= 1
    parts["weight"] = flat.view(torch.float8_e4m3fn)
    found = judged(blocks[0], folder(tmp_path / "one", {f"{NAME}.{k}": v for k, v in parts.items()}))
    assert found.code == 2
    assert "1 of 60,000 elements, largest at [3, 4]" in found.sentence


def test_a_checkpoint_that_lacks_scales_is_not_identical_to_itself(tmp_path, capsys):
    held = {}
    for i in range(2):
        parts, _, config = gptq(0.02 * torch.randn(32, 64, generator=torch.Generator().manual_seed(i)), 4)
        held |= {f"model.layers.{i}.mlp.down_proj.{k}": v for k, v in parts.items()}
    del held["model.layers.1.mlp.down_proj.scales"]
    path = folder(tmp_path / "lost", held, config)
    found = judged(path, path)
    assert found.code == 3
    assert "model.layers.1.mlp.down_proj.scales is missing" in found.sentence
    assert main(["ckpt-show", "--check", str(path)]) == 3
    assert "the scales of model.layers.1.mlp.down_proj.weight" in capsys.readouterr().out


def _state(**changed):
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [32, 64]} | changed
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


HOSTILE = {
    "more elements than codes": {"weight.quant_state.bitsandbytes__nf4": _state(shape=[1 << 40, 1 << 20])},
    "a negative shape": {"weight.quant_state.bitsandbytes__nf4": _state(shape=[-1, -2048])},
    "blocks of no element": {"weight.quant_state.bitsandbytes__nf4": _state(blocksize=0)},
    "blocks without end": {"weight.quant_state.bitsandbytes__nf4": _state(blocksize=1 << 50)},
    "a shape that is text": {"weight.quant_state.bitsandbytes__nf4": _state(shape="32")},
    "no description": {"weight.quant_state.bitsandbytes__nf4": torch.tensor([91] * 5000, dtype=torch.uint8)},
    "too few largest values": {"weight.absmax": torch.ones(3)},
    "a short table": {"weight.quant_map": torch.ones(3)},
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_parts_that_do_not_fit_are_said_to_be_not_compared(damage, tmp_path):
    parts = load_file(DATA / "bitsandbytes_nf4.safetensors")
    parts |= {f"m.proj.{k}": v for k, v in HOSTILE[damage].items()}
    plain = folder(tmp_path / "plain", load_file(DATA / "bitsandbytes_nf4.values.safetensors"))
    found = judged(folder(tmp_path / "coded", parts), plain)
    assert found.code == 3
    assert "not compared" in found.sentence or "do not fit each other" in "".join(found.details)
