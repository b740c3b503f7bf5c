"""DeepSpeed on two ranks, ZeRO 0 to 3 in float32 and bfloat16: real processes, one pair for all that is asked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distributed.launch import launch
from tests.integrations.deepspeed.small_deepspeed import CONFIGURATIONS, DECAY, LR, STATE, STEPS, plain_torch
from tests.integrations.records import recorded
from trainprobe.engine.storage.dumps import read_step
from trainprobe.errors import UsageError

DUMPS = ["zero3-fp32-dump", "zero3-fp32-dump_of_all", "zero3-fp32-always_cut", "zero2-fp32-direct"]
EXACT = [name for name in CONFIGURATIONS if "fp32" in name.split("-")]
ROUNDED = [name for name in CONFIGURATIONS if name not in EXACT]
DECAYED = LR * DECAY
MATRICES = [f"{layer}.weight main_value" for layer in ("fc1", "fc2", "head")]
NAMES = [f"{layer}.{part}" for layer in ("fc1", "norm", "fc2", "head") for part in ("weight", "bias")]


@pytest.fixture(scope="module")
def pair(require, tmp_path_factory) -> tuple[Path, list[dict]]:
    require("deepspeed")
    folder = tmp_path_factory.mktemp("pair")
    launch(Path(__file__).with_name("train_pair.py"), 2, str(folder), timeout=240)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def joined(pair, configuration: str) -> list[dict[str, float]]:
    """Return by step the norms of whole tensors: of the pieces that the ranks hold where ZeRO cuts, of rank 0's elsewhere."""
    ranks = [recorded(pair[0] / configuration, rank) for rank in range(2)]
    stage = int(configuration[4])
    steps = []
    for step in range(1, STEPS + 1):
        told = {}
        for key in {**ranks[0][step], **ranks[1][step]}:
            whole = stage == 0 or (stage < 3 and key.endswith((" value", " value_after")))
            pieces = [rank[step][key] for rank in ranks if key in rank[step]]
            told[key] = pieces[0] if whole or " " not in key else sum(piece**2 for piece in pieces) ** 0.5
        steps.append(told)
    return steps


@pytest.mark.proves(
    "DeepSpeed",
    {
        "zero0-fp32": "ZeRO 0",
        "zero1-fp32": "ZeRO 1",
        "zero2-fp32": "ZeRO 2",
        "zero3-fp32": "ZeRO 3",
        "zero2-fp32-offload": "offload",
        "zero3-fp32-offload": "offload",
        "zero0-bf16": "bf16",
        "zero1-bf16": "bf16",
        "zero2-bf16": "bf16",
        "zero3-bf16": "bf16",
        "zero2-fp16": "fp16",
    },
    ranks=2,
)
@pytest.mark.parametrize("configuration", [*CONFIGURATIONS, *DUMPS])
def test_each_rank_trains_to_the_same_bits_with_and_without_the_probe(pair, configuration):
    assert [told[f"{configuration} different bits"] for told in pair[1]] == [[], []]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_nothing_is_left_on_the_engine(pair, configuration):
    assert [told[f"{configuration} left"] for told in pair[1]] == [[], []]


@pytest.mark.proves(
    "DeepSpeed", {"zero0-fp32": "ZeRO 0", "zero1-fp32": "ZeRO 1", "zero2-fp32": "ZeRO 2", "zero3-fp32": "ZeRO 3"}, ranks=2
)
@pytest.mark.parametrize("configuration", EXACT)
def test_pieces_join_to_the_numbers_of_one_process_of_plain_torch(pair, configuration):
    slots = ("value", "grad_unclipped", "grad", *(f"{slot}_after" for slot in STATE), "value_after")
    for found, expected in zip(joined(pair, configuration), plain_torch(), strict=True):
        wanted = {f"{name} {slot}": expected[f"{name} {slot}"] for name in NAMES for slot in slots}
        assert {key: found.get(key) for key in wanted} == pytest.approx(wanted, rel=5e-5, abs=1e-9)


@pytest.mark.parametrize("configuration", ROUNDED)
def test_half_precision_starts_with_the_numbers_of_one_process_of_plain_torch_but_for_rounding(pair, configuration):
    found, expected = joined(pair, configuration)[0], plain_torch()[0]
    if configuration == "zero2-fp16":
        assert found["loss_scale"] == 256
    wanted = {f"{name} {slot}": expected[f"{name} {slot}"] for name in NAMES for slot in ("value", "grad_unclipped", "grad")}
    assert {key: found.get(key) for key in wanted} == pytest.approx(wanted, rel=0.04, abs=1e-6)
    masters = {f"{name} main_value": found[f"{name} value"] for name in NAMES}
    if configuration == "zero0-bf16":  # DeepSpeed steps once with no gradients when it starts, which decays the master weights
        masters = {key: value * (1 - DECAYED if key in MATRICES else 1) for key, value in masters.items()}
    assert {key: found.get(key) for key in masters} == pytest.approx(masters, rel=1e-5)


@pytest.mark.parametrize("configuration", EXACT)
def test_unreduced_gradients_are_what_each_rank_hands_to_the_reduction(pair, configuration):
    told = "grad_unreduced" if int(configuration[4]) < 2 else "grad_unreduced_last"
    for rank in range(2):
        found = recorded(pair[0] / configuration, rank)
        for step, expected in enumerate(plain_torch(), 1):
            wanted = {f"{name} grad_unreduced": expected[f"{name} {told} {rank}"] for name in NAMES}
            assert {key: found[step].get(key) for key in wanted} == pytest.approx(wanted, rel=5e-5, abs=1e-9)


@pytest.mark.parametrize("configuration", EXACT)
def test_scalars_are_those_that_deepspeed_reports(pair, configuration):
    for rank in range(2):
        found = recorded(pair[0] / configuration, rank)
        for step, expected in enumerate(plain_torch(), 1):
            wanted = {"loss": expected[f"loss {rank}"], "lr": expected["lr"], "skipped": 0.0}
            wanted |= {"grad_norm": expected["grad_norm"]} if configuration != "zero0-fp32" else {}  # which reports none
            assert {key: found[step].get(key) for key in wanted} == pytest.approx(wanted, rel=2e-5)


def test_a_dump_under_zero_3_holds_whole_weights_of_both_micro_batches_and_no_evaluation(pair):
    first = [told["fc1.weight value"] for told in plain_torch()][1]
    for step_data in read_step(pair[0] / "dump" / "step2").values():
        rows = [row for row in step_data.records() if row.site.kind == "module" and row.site.slot == "parameters.weight"]
        weights = [row for row in rows if row.site.name == "fc1"]
        assert [(row.step.micro, row.shape) for row in weights] == [(0, (13, 7)), (1, (13, 7))]
        assert [row.values["norm"] for row in weights] == pytest.approx([first, first], rel=5e-5)


def test_micro_batches_are_counted_where_the_program_calls_backward_by_itself(pair):
    for step in range(1, STEPS + 1):
        for step_data in read_step(pair[0] / "direct" / f"step{step}").values():
            assert [call.micro for call in step_data.calls if call.name == "fc1" and call.phase == "forward"] == [0, 1]


@pytest.mark.parametrize("configuration", ["zero0-fp32", "zero0-bf16", "zero2-fp32", "zero3-fp32"])
def test_a_nan_of_one_rank_is_named_with_its_step_rank_and_parameter(pair, configuration):
    assert pair[1][1][f"{configuration} named"] == [[2, 1, "fc2.weight", "grad_unreduced"]]
    other = pair[1][0][f"{configuration} named"]
    assert all(row[:3] == [2, 0, "fc2.weight"] and row[3] != "grad_unreduced" for row in other), (
        "it gets there by the reduction"
    )


@pytest.mark.proves("DeepSpeed", "skipped steps", ranks=2)
@pytest.mark.parametrize("configuration", ["zero0-bf16", "zero2-fp32", "zero3-fp32"])
def test_a_step_that_deepspeed_skips_says_so_and_shows_the_gradient_that_made_it_so(pair, configuration):
    ranks = [recorded(pair[0] / f"poisoned{configuration[4:]}", rank) for rank in range(2)]
    assert [[rank[step]["skipped"] for step in range(1, STEPS + 1)] for rank in ranks] == [[0, 1, 0]] * 2
    slot = "grad" if configuration == "zero2-fp32" else "grad_unclipped"
    assert any(rank[2].get(f"fc2.weight {slot}", 0.0) != rank[2].get(f"fc2.weight {slot}", 0.0) for rank in ranks)


@pytest.mark.proves("DeepSpeed", "resume", ranks=2)
def test_a_resumed_run_goes_on_with_the_numbers_of_its_steps(pair):
    assert list(recorded(pair[0] / "resumed")) == [1, 2, 3]


def test_the_rules_of_a_resumed_run_go_on_from_its_checkpoint(pair):
    states = [{rule: memory["arrays"] for rule, memory in state["rules"].items()} for state in pair[1][0]["resumed rules"]]
    assert states[0]["spike"]["count"] and states == [states[0]] * 3


def test_anything_but_an_engine_is_refused(require):
    require("torch")
    from trainprobe.integrations.deepspeed import attach

    with pytest.raises(UsageError, match=r"SimpleNamespace.*deepspeed.initialize"):
        attach(SimpleNamespace())
