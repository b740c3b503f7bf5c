"""Lightning on two ranks, DDP, FSDP2 (ModelParallelStrategy) and FSDP1 (FSDPStrategy): real processes, one pair for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch


@pytest.fixture(scope="module")
def pair(require, tmp_path_factory) -> tuple[Path, list[dict]]:
    require("lightning.pytorch")
    folder = tmp_path_factory.mktemp("pair")
    launch(Path(__file__).with_name("train_pair.py"), 2, str(folder), timeout=240)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.proves("Lightning", {"ddp": "DDP", "fsdp2": "FSDP2", "fsdp": "FSDP1"}, ranks=2)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp", "dump", "audit", "sharded"])
def test_each_rank_trains_to_the_same_bits_with_and_without_the_probe(pair, kind):
    assert [told[f"{kind} different bits"] for told in pair[1]] == [[], []]


def expected(clip: bool) -> list[dict[str, float]]:
    from tests.integrations.lightning.small_lightning import CLIP, batches, plain_torch

    return plain_torch(2, CLIP if clip else None, [batches(rank) for rank in range(2)])


@pytest.mark.proves("Lightning", "DDP", ranks=2)
def test_numbers_under_ddp_are_those_of_one_process_of_plain_torch(pair):
    from tests.integrations.lightning.small_lightning import recorded

    for rank in range(2):
        found = recorded(pair[0] / "ddp", rank)
        for step, numbers in enumerate(expected(clip=True)):
            shared = {name: value for name, value in numbers.items() if name != "loss" and " rank" not in name}
            assert {name: found[step][name] for name in shared} == pytest.approx(shared, rel=5e-5, abs=1e-9)


@pytest.mark.proves("Lightning", "DDP", ranks=2)
def test_gradients_before_the_reduction_are_each_ranks_own(pair):
    from tests.integrations.lightning.small_lightning import recorded

    for rank in range(2):
        found = recorded(pair[0] / "ddp", rank)
        for step, numbers in enumerate(expected(clip=True)):
            own = {
                name.replace(f" rank{rank}", " grad_unreduced"): v
                for name, v in numbers.items()
                if name.endswith(f" rank{rank}")
            }
            assert len(own) == 4
            assert {name: found[step][name] for name in own} == pytest.approx(own, rel=5e-5, abs=1e-9)


def test_the_loss_of_each_rank_is_its_own_and_their_mean_that_of_one_process(pair):
    from tests.integrations.lightning.small_lightning import recorded

    ranks = [recorded(pair[0] / "ddp", rank) for rank in range(2)]
    for step, numbers in enumerate(expected(clip=True)):
        assert sum(rank[step]["loss"] for rank in ranks) / 2 == pytest.approx(numbers["loss"], rel=1e-5)


@pytest.mark.proves("Lightning", {"fsdp2": "FSDP2", "fsdp": "FSDP1"}, ranks=2)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp"])
def test_shards_join_to_the_norms_of_one_process_of_plain_torch(pair, kind):
    from tests.integrations.lightning.small_lightning import recorded

    ranks = [recorded(pair[0] / kind, rank) for rank in range(2)]
    for step, numbers in enumerate(expected(clip=False)):
        for name, value in numbers.items():
            if " " in name and "unclipped" not in name and " rank" not in name:
                joined = sum(rank[step].get(name, 0.0) ** 2 for rank in ranks) ** 0.5
                assert joined == pytest.approx(value, rel=5e-5, abs=1e-9), (step, name)


@pytest.mark.proves("Lightning", {"healthy": "DDP", "sharded": "FSDP1"}, ranks=2)
@pytest.mark.parametrize("run", ["healthy", "sharded"])
def test_the_audit_finds_nothing_in_a_healthy_training(pair, run):
    assert [told[run] for told in pair[1]] == [[], []]


@pytest.mark.proves("Lightning", "FSDP1", ranks=2)
def test_a_gradient_that_one_rank_of_fsdp_spoils_is_found_on_it_before_the_reduction_with_the_parameters_name(pair):
    ranks = [told["poisoned"] for told in pair[1]]
    assert ranks[1][0] == [2, 1, "net.second.weight", "grad_unreduced"]
    assert ranks[0][0][:3] == [2, 0, "net.second.weight"], "the other rank has it through the reduced gradient"


@pytest.mark.proves("Lightning", "DDP", ranks=2)
def test_a_replica_that_drifts_is_found_at_its_step_with_the_parameters_name(pair):
    for told in pair[1]:
        rule, step, message = told["drifting"][0]
        assert step == 2 and "net.second.weight" in message, (rule, message)


@pytest.mark.proves("Lightning", "DDP", ranks=2)
def test_a_nan_of_one_rank_is_found_with_its_rank_and_the_parameters_name(pair):
    ranks = [told["first not finite"] for told in pair[1]]
    assert ranks[1] == [2, 1, "net.second.weight"]
    assert ranks[0][:2] == [2, 0], "the other rank has it through the reduced gradient"


def test_all_ranks_stop_at_the_step_at_which_one_of_them_found_something(pair):
    stopped = [told["stopped at"] for told in pair[1]]
    assert stopped[0] == stopped[1] == 2
