"""DeepSpeed's pipeline with tied ends: two stages, without ZeRO and with ZeRO 1, alone and times two data-parallel ranks."""

from __future__ import annotations

import pytest

from tests.integrations.deepspeed.parallel import PIPES, whole
from tests.integrations.deepspeed.small_pipeline import TIED, clip_of, plain
from trainprobe.engine.storage.dumps import read_step
from trainprobe.engine.storage.dumps.log import read_log

LAYOUTS = [(ranks, name) for ranks, names in PIPES.items() for name in names]
LAYERS = (("1.lin", "2.lin"), ("3.lin",))  # of each stage, besides the tied one
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.mark.proves("DeepSpeed", "pipeline", ranks=(2, 4))
@pytest.mark.parametrize(("ranks", "name"), [*LAYOUTS, (2, "pipe-zero0-fp32-dump")])
def test_each_rank_trains_to_the_same_bits_with_and_without_the_probe(trained, ranks, name):
    assert [told["different bits"] for told in trained.told(ranks, name)] == [[]] * ranks
    assert [told["left"] for told in trained.told(ranks, name)] == [[]] * ranks


@pytest.mark.proves("DeepSpeed", "pipeline", ranks=(2, 4))
@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_stages_hold_their_layers_under_global_numbers_and_the_tied_one_each(trained, ranks, name):
    for rank, recorded in enumerate(trained.recorded(ranks, name)):
        names = {key.split()[0].rpartition(".")[0] for key in recorded[1] if key.endswith(" value")}
        assert names == {TIED.rpartition(".")[0], *LAYERS[rank // (ranks // 2)]}


@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_the_place_of_each_process_is_known(trained, ranks, name):
    replicas = ranks // 2
    for rank, told in enumerate(trained.told(ranks, name)):
        stage = {"pp": [rank // replicas, 2]}
        assert told["axes"] == (stage if replicas == 1 else {"dp": [rank % replicas, replicas], **stage})


@pytest.mark.proves("DeepSpeed", "pipeline", ranks=(2, 4))
@pytest.mark.parametrize(("ranks", "name"), [layout for layout in LAYOUTS if layout[1].endswith("fp32")])
def test_all_layers_have_the_numbers_of_one_process_of_plain_torch(trained, ranks, name):
    recorded, stage = trained.recorded(ranks, name), int(name[9])
    for step, expected in enumerate(plain(ranks // 2, clip_of(stage)), 1):
        wanted = {key: value for key, value in expected.items() if " " in key}
        for key, value in wanted.items():
            holders = [rank[step][key] for rank in recorded if key in rank[step]]
            if ranks == 2:  # a stage has all of what it holds
                assert len(set(holders)) == 1, (key, "the two copies of a tied weight differ")
                holders = holders[:1]
            assert whole(holders, key, stage) == pytest.approx(value, rel=1e-4, abs=1e-8), key
        for rank in recorded:
            assert rank[step]["loss"] == pytest.approx(expected["loss"], rel=2e-5)
            assert rank[step].get("grad_norm") == (pytest.approx(expected["grad_norm"], rel=2e-5) if stage else None)


@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_the_tied_weight_is_known_as_a_replica_over_the_stages(trained, ranks, name):
    for rank in range(ranks):
        for step_data in read_log(trained.folder / str(ranks) / name / f"rank{rank}"):
            values = [call.params["value"] for call in step_data.calls if call.name == TIED and "value" in (call.params or {})]
            assert values
            assert all(set(value.extra["shard"]["replicas"]) == ({"pp"} if ranks == 2 else {"dp", "pp"}) for value in values)


@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_a_healthy_training_raises_no_alarm(trained, ranks, name):
    assert trained.found(ranks, name) == [[]] * ranks


def test_a_nan_in_the_tied_weight_is_named_on_the_stage_that_computed_it(trained):
    """The first stage gets it by the reduction of the tied gradients."""
    first, second = trained.folder / "2" / "pipe-zero1-fp32 nan", 1
    assert trained.found(2, "pipe-zero1-fp32@nan")[second][0] == ["nonfinite", 3, 1, TIED]
    slots = [unreduced_nans(first / f"rank{rank}") for rank in range(2)]
    assert slots == [set(), {TIED}]


def unreduced_nans(log) -> set[str]:
    found = [record for step_data in read_log(log) for record in step_data.records() if record.site.slot == "grad_unreduced"]
    return {record.site.name for record in found if record.values["norm"] != record.values["norm"]}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tied_weight_that_drifts_on_one_rank_is_named_on_all_that_hold_it(trained, ranks):
    found = trained.found(ranks, "pipe-zero1-fp32@drift")
    assert found[1][0] == ["untouched_between_steps", 3, 1, TIED]
    assert all(["replicas", 3, rank, TIED] in found[rank] for rank in range(ranks))


def test_a_dump_numbers_its_micro_batches(trained):
    for rank, step_data in read_step(trained.folder / "2" / "pipe-zero0-fp32-dump" / "step2").items():
        name = LAYERS[rank][0]
        outputs = [row for row in step_data.records() if row.site.name == name and row.site.slot == "output"]
        assert [row.step.micro for row in outputs] == [0, 1]
        assert step_data.place.axes == {"pp": (rank, 2)}
