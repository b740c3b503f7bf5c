"""Plain loops under FullyShardedDataParallel (FSDP1) on two ranks: real gradients of shards, under the original names.

"views": use_orig_params=True, the optimizer steps views of the flat parameter; "flat": it steps the flat parameter itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.integrations.lightning.small_lightning import CLIP, batches, plain_torch
from tests.integrations.records import recorded

KINDS = ("views", "flat")
FAULTY = 2
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def pair(require, tmp_path_factory) -> tuple[Path, list[dict]]:
    require("accelerate")
    folder = tmp_path_factory.mktemp("flat")
    launch(Path(__file__).with_name("train_flat_shards.py"), 2, str(folder), timeout=280)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def parameters(numbers: dict[str, float]) -> dict[str, float]:
    """Return what stands for a parameter of the whole model, out of `plain_torch`."""
    return {name: value for name, value in numbers.items() if " " in name and " rank" not in name}


@pytest.mark.proves("PyTorch", "FSDP1", ranks=2)
@kinds
@pytest.mark.parametrize("run", ["shards", "whole", "accumulated", "dump", "audit"])
def test_each_rank_trains_to_the_same_bits_with_and_without_the_probe(pair, kind, run):
    assert [told[f"{kind} {run} different bits"] for told in pair[1]] == [[], []]
    assert not [found for told in pair[1] for found in told[f"{kind} {run} found"] if found[0] == "plan"]


@pytest.mark.proves("PyTorch", "FSDP1", ranks=2)
@kinds
@pytest.mark.parametrize(("run", "accumulate"), [("shards", 1), ("accumulated", 2)])
def test_pieces_of_both_ranks_join_to_the_numbers_of_one_process_of_plain_torch(pair, kind, run, accumulate):
    assert_joined(pair[0] / f"{kind} {run}", accumulate)


def assert_joined(output: Path, accumulate: int = 1) -> None:
    """Assert that the pieces of both ranks have the norms of the same training in one process of plain torch."""
    ranks = [recorded(output, rank) for rank in range(2)]
    for step, numbers in enumerate(plain_torch(accumulate, CLIP, [batches(0), batches(1)])):
        for name, value in parameters(numbers).items():
            joined = sum(found[step].get(name, 0.0) ** 2 for found in ranks) ** 0.5
            assert joined == pytest.approx(value, rel=5e-5, abs=1e-9), (step, name)
        for found in ranks:
            assert found[step]["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=1e-5)
            assert found[step]["lr"] == numbers["lr"]


@pytest.mark.proves("PyTorch", "FSDP1", ranks=2)
@kinds
def test_without_sharding_every_rank_holds_all(pair, kind):
    for step, numbers in enumerate(plain_torch(1, CLIP, [batches(0), batches(1)])):
        for rank in range(2):
            found = recorded(pair[0] / f"{kind} whole", rank)[step]
            expected = parameters(numbers)
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=5e-5, abs=1e-9), step


@pytest.mark.proves("PyTorch", "FSDP1", ranks=2)
@kinds
@pytest.mark.parametrize("run", ["shards", "whole"])
def test_gradients_before_the_reduction_are_each_ranks_own_and_whole(pair, kind, run):
    for step, numbers in enumerate(plain_torch(1, CLIP, [batches(0), batches(1)])):
        for rank in range(2):
            own = {name.removesuffix(f" rank{rank}"): v for name, v in numbers.items() if name.endswith(f" rank{rank}")}
            assert len(own) == 4
            found = recorded(pair[0] / f"{kind} {run}", rank)[step]
            assert {name: found[f"{name} grad_unreduced"] for name in own} == pytest.approx(own, rel=5e-5, abs=1e-9)


@pytest.mark.proves("PyTorch", "FSDP1", ranks=2)
@kinds
def test_pieces_tell_their_place_in_the_original_parameter(pair, kind):
    """The slices of the ranks lie end to end and are the whole parameter, for values, gradients and states alike."""
    from trainprobe.engine.storage.dumps.log import read_log

    found: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for rank in range(2):
        step_data = next(iter(read_log(pair[0] / f"{kind} shards" / f"rank{rank}")))
        for call in step_data.calls:
            for slot, value in (call.params or {}).items() if call.kind == "state" else ():
                if "unreduced" not in slot and not slot.startswith(("step", "update")):
                    (offset,), (count,), (whole,) = (value.extra["shard"][key] for key in ("offset", "shape", "whole"))
                    assert value.shape == (count,)
                    found.setdefault((call.name, slot), []).append((offset, count, whole))
    sizes = {"first.weight": 72, "first.bias": 12, "second.weight": 12, "second.bias": 1}
    assert {name for name, _ in found} == set(sizes)
    assert {slot for _, slot in found} >= {
        "value",
        "value_after",
        "grad",
        "grad_unclipped",
        "exp_avg_after",
        "exp_avg_sq_after",
    }
    for (name, slot), pieces in found.items():
        end = 0
        for offset, count, whole in sorted(pieces):
            assert (offset, whole) == (end, sizes[name]), (name, slot)
            end += count
        assert end == sizes[name], (name, slot)


@pytest.mark.proves("PyTorch", "FSDP1", ranks=2)
@kinds
def test_modules_are_recorded_once_and_under_their_own_names(pair, kind):
    data = json.loads((pair[0] / f"{kind} dump" / "step1" / "rank0" / "dump.json").read_text())["data"]
    forwards = [key for key in data if key.startswith("Module.") and ".forward." in key]
    assert sorted(key.split(".")[1] for key in forwards) == ["drop", "first", "root", "second"]
    assert not any("Fully" in key or "_fsdp" in key for key in data)


@pytest.mark.proves("PyTorch", "FSDP1", ranks=2)
@kinds
def test_the_audit_finds_nothing_in_a_healthy_training(pair, kind):
    for run in ("audit", "shards", "whole", "accumulated"):
        assert [told[f"{kind} {run} found"] for told in pair[1]] == [[], []], run


@pytest.mark.proves("PyTorch", "FSDP1", ranks=2)
@kinds
def test_a_nan_that_one_rank_makes_is_found_with_its_rank_and_the_original_name(pair, kind):
    for rank, told in enumerate(pair[1]):
        first = [finding for finding in told[f"{kind} nan found"] if finding[0] == "nonfinite"]
        assert first[0][1:4] == [FAULTY, rank, "second.weight"], first
    own = [recorded(pair[0] / f"{kind} nan", rank)[FAULTY]["second.weight grad_unreduced"] for rank in range(2)]
    assert own[0] == own[0], "the rank that did not make it has a gradient of numbers before the reduction"
    assert own[1] != own[1]


@pytest.mark.proves("PyTorch", "FSDP1", ranks=2)
@kinds
def test_a_shard_that_is_written_to_between_two_updates_is_named_on_its_rank(pair, kind):
    found = [told[f"{kind} drift found"] for told in pair[1]]
    assert found[0] == []
    assert found[1][0][:4] == ["untouched_between_steps", FAULTY, 1, "second.weight"]


@pytest.mark.proves("Accelerate", "FSDP1", ranks=2)
def test_a_loop_of_accelerate_under_fsdp_is_a_plain_loop(pair):
    assert [told["accelerate same"] for told in pair[1]] == [True, True]
    assert [told["accelerate found"] for told in pair[1]] == [[], []]
    assert_joined(pair[0] / "accelerate")
