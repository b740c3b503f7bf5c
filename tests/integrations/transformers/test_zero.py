"""DeepSpeed beneath the Hugging Face Trainer and beneath Lightning, reached through their callbacks: two gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.integrations.records import recorded


@pytest.fixture(scope="module")
def pair(require, tmp_path_factory, monkeypatch_module) -> tuple[Path, list[dict]]:
    for library in ("deepspeed", "transformers", "accelerate", "lightning.pytorch"):
        require(library)
    folder = tmp_path_factory.mktemp("zero")
    monkeypatch_module.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch_module.setenv("LOCAL_SIZE", "2")
    launch(Path(__file__).with_name("train_zero.py"), 2, str(folder), timeout=280)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


RUNS = ("hf2", "hf3", "lightning2")


@pytest.mark.proves("Hugging Face Trainer", {"hf2": "ZeRO 2", "hf3": "ZeRO 3"}, ranks=2)
@pytest.mark.proves("Lightning", {"lightning2": "ZeRO 2"}, ranks=2)
@pytest.mark.parametrize("run", RUNS)
def test_the_losses_have_the_same_bits_with_and_without_the_probe(pair, run):
    assert [told[f"{run} same"] for told in pair[1]] == [True, True]


@pytest.mark.proves("Hugging Face Trainer", {"hf2": "ZeRO 2", "hf3": "ZeRO 3"}, ranks=2)
@pytest.mark.proves("Lightning", {"lightning2": "ZeRO 2"}, ranks=2)
@pytest.mark.parametrize("run", RUNS)
def test_pieces_of_all_ranks_join_to_the_norms_of_one_process_of_plain_torch(pair, run):
    if run.startswith("hf"):
        from tests.integrations.transformers.small_trainer import CLIP, plain_torch

        expected, first = plain_torch(2, CLIP, ranks=2), 1
    else:
        from tests.integrations.lightning.small_lightning import CLIP, batches, plain_torch

        expected, first = plain_torch(2, CLIP, [batches(0), batches(1)]), 0
        for numbers in expected:  # Lightning 2.6 divides by the accumulation, and DeepSpeed beneath it divides again
            numbers |= {name: value / 2 for name, value in numbers.items() if name.endswith(("grad_unclipped", "grad_norm"))}
    ranks = [recorded(pair[0] / run, rank) for rank in range(2)]
    assert [list(found) for found in ranks] == [list(range(first, first + len(expected)))] * 2
    for step, numbers in enumerate(expected, first):
        for name, value in numbers.items():
            if name.endswith((" grad", " exp_avg_after", " grad_unclipped")):
                joined = sum(found[step].get(name, 0.0) ** 2 for found in ranks) ** 0.5
                assert joined == pytest.approx(value, rel=1e-4, abs=1e-9), (step, name)
        for found in ranks:
            assert found[step]["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=1e-4)
            assert found[step]["lr"] == pytest.approx(numbers["lr"])
        assert sum(found[step]["loss"] for found in ranks) / 2 == pytest.approx(numbers["loss"], rel=1e-4)


@pytest.mark.proves("Lightning", "DeepSpeed experts (MoE)", ranks=2)
def test_an_expert_beneath_lightning_is_named_by_its_global_number_on_its_rank(pair):
    layer = "net.moe.deepspeed_moe"
    assert pair[1][1]["experts"] == [["nonfinite", 1, f"{layer}.experts.deepspeed_experts.2.bias"]]
    assert pair[1][0]["experts"] == [["nonfinite", 1, layer]], "it holds nothing of that expert, and sees what comes back of it"
