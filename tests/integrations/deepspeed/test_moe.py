"""DeepSpeed's mixture of experts: four experts over two ranks, and over four, where each expert has a replica."""

from __future__ import annotations

import pytest

from tests.integrations.deepspeed.parallel import DRAWN, MOE, STAGES, whole
from tests.integrations.deepspeed.small_deepspeed import STATE
from tests.integrations.deepspeed.small_moe import EXPERTS, PATH, clip_of, plain_moe

LAYOUTS = [(ranks, name) for ranks, names in MOE.items() for name in names]
BROKEN = f"{PATH}.3.down.weight"  # of the second expert of rank 1
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.mark.proves("DeepSpeed", "experts (MoE)", ranks=(2, 4))
@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_each_rank_trains_to_the_same_bits_with_and_without_the_probe(trained, ranks, name):
    assert [told["different bits"] for told in trained.told(ranks, name)] == [[]] * ranks
    assert [told["left"] for told in trained.told(ranks, name)] == [[]] * ranks


@pytest.mark.proves("DeepSpeed", "experts (MoE)", ranks=(2, 4))
@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_experts_carry_the_numbers_that_they_have_over_all_ranks(trained, ranks, name):
    for rank, recorded in enumerate(trained.recorded(ranks, name)):
        names = {key.split()[0] for key in recorded[1] if PATH in key}
        numbers = {int(expert.removeprefix(f"{PATH}.").split(".")[0]) for expert in names}
        assert numbers == {2 * (rank % 2), 2 * (rank % 2) + 1}


@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_the_place_of_each_process_is_known(trained, ranks, name):
    axes = [told["axes"] for told in trained.told(ranks, name)]
    assert axes == [{"dp": [rank, ranks], "ep": [rank % 2, 2]} for rank in range(ranks)]


@pytest.mark.proves("DeepSpeed", "experts (MoE)", ranks=(2, 4))
@pytest.mark.parametrize(("ranks", "name"), [layout for layout in LAYOUTS if "fp32" in layout[1]])
def test_all_experts_have_the_numbers_of_one_process_of_plain_torch(trained, ranks, name):
    recorded, stage = trained.recorded(ranks, name), int(name[4])
    for step, expected in enumerate(plain_moe(ranks, clip_of(stage)), 1):
        wanted = {key: value for key, value in expected.items() if " " in key and not key.startswith("loss ")}
        assert sum(PATH in key for key in wanted) == 4 * EXPERTS * (3 + len(STATE))
        found = {key: whole([rank[step][key] for rank in recorded if key in rank[step]], key, stage) for key in wanted}
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-8)
        for rank in range(ranks):
            assert recorded[rank][step]["loss"] == pytest.approx(expected[f"loss {rank}"], rel=2e-5)
            norm = recorded[rank][step].get("grad_norm")
            assert norm == (pytest.approx(expected["grad_norm"], rel=2e-5) if stage else None)


@pytest.mark.parametrize(("ranks", "name"), [layout for layout in LAYOUTS if layout[1] != DRAWN])
def test_a_healthy_training_raises_no_alarm(trained, ranks, name):
    assert trained.found(ranks, name) == [[]] * ranks


def test_a_router_that_draws_random_numbers_in_evaluation_raises_no_alarm(trained):
    """As DeepSpeed's does in its default setting, `use_rts`: it samples on purpose, which is a note and no warning."""
    assert trained.found(2, DRAWN) == [[], []]


@pytest.mark.parametrize("name", STAGES)
def test_a_nan_in_one_expert_is_named_by_its_global_number_on_its_rank(trained, name):
    first, second = trained.found(2, f"{name}@nan")
    assert second == [["nonfinite", 3, 1, BROKEN], ["finite_together", 3, 1, BROKEN]]
    assert first == ([["nonfinite", 3, 0, "grad_norm"]] if name != "zero0-fp32" else []), "it holds nothing of that expert"


@pytest.mark.parametrize("name", STAGES)
def test_an_expert_that_drifts_from_its_replica_is_named_on_both_ranks_that_hold_it(trained, name):
    """Under ZeRO 1 rank 3 alone steps this weight; both hold it."""
    own, other = ["untouched_between_steps", 3, 1, BROKEN], ["replicas", 3, 3, BROKEN]
    assert trained.found(4, f"{name}@drift") == [[], [own, ["replicas", 3, 1, BROKEN]], [], [other]]
