"""`trainprobe judge --fleet`: planted faults are found, with rank, step and tensor, and healthy fleets are left alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from benchmarks.fleet import Fleet, Planted, planted_in, write_fleet, write_through_sink
from trainprobe.cli import main
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.dumps.layout import find_segments
from trainprobe.monitor.fleet import groups as groups_module
from trainprobe.monitor.fleet import survey as survey_module

pytest.importorskip("duckdb", reason="requirements/oldest.txt is without DuckDB")

SHAPE = Fleet(data=16, tensor=2, pipeline=2, steps=12, parameters=6, activations=10)  # 64 ranks


def judged(folder, capsys):
    code = main(["judge", "--fleet", str(folder), "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, found


@pytest.fixture(scope="module", params=["stored once", "whole"])
def faulty(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    fleet = replace(SHAPE, planted=planted_in(SHAPE))
    write_fleet(fleet, folder, whole=request.param == "whole")
    return folder, fleet.planted


def test_each_planted_fault_is_found_and_nothing_else(faulty, capsys):
    folder, planted = faulty
    code, found = judged(folder, capsys)
    assert code == 1
    by_rule = {finding["rule"]: finding for finding in found}
    assert sorted(finding["rule"] for finding in found) == sorted(by_rule)
    assert {rule: (f["step"], f["ranks"] or [f["place"]["rank"]]) for rule, f in by_rule.items()} == {
        "fleet_replicas": (planted.parted[1], [planted.parted[0]]),
        "nonfinite": (planted.nan[1], [planted.nan[0]]),
        "fleet_steps": (planted.stopped[1], [planted.stopped[0]]),
        "fleet_scalars": (planted.loss[1], [planted.loss[0]]),
        "fleet_late": (planted.late[1], list(range(32, 64))),
    }
    assert by_rule["fleet_replicas"]["site"]["name"] == "layers.0.weight3"
    assert by_rule["fleet_replicas"]["site"]["slot"] == "value"
    assert by_rule["fleet_replicas"]["count"] == SHAPE.steps - planted.parted[1]
    assert by_rule["nonfinite"]["site"]["name"] == "layers.3"
    assert "all 32 ranks with pipeline stage 1" in by_rule["fleet_late"]["message"]


def test_the_first_line_names_rank_step_tensor_and_what_to_do(faulty, capsys):
    folder, planted = faulty
    assert main(["judge", "--fleet", str(folder)]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    rank, step = planted.parted
    for word in (f"rank {rank} ", f"step {step} ", "parameter layers.0.weight3", "trainprobe dump-compare", "left 15 replicas"):
        assert word in first
    assert rest[-1].startswith("64 ranks, 12 steps, 48 values a step compared among the replicas of 64 ranks: 5 findings")


def test_a_healthy_fleet_has_no_finding(tmp_path, capsys):
    """Tensor shards, pipeline stages, activations and losses differ from rank to rank, and should."""
    write_fleet(replace(SHAPE, data=4), tmp_path)
    assert judged(tmp_path, capsys) == (0, [])
    assert main(["judge", "--fleet", str(tmp_path)]) == 0
    assert "nothing found" in capsys.readouterr().out


class Unreduced(Fleet):
    """Ranks whose gradients are those before the reduction: each rank has its own."""

    def _plant(self, partials, sums, rank, step):
        rows = slice(self.activations + 1, None, 2)
        sums[rows] += rank + 1


class Sharded(Fleet):
    """Every data-parallel rank holds a piece of its own of each parameter; biases are zeros at first, and alike."""

    def _plant(self, partials, sums, rank, step):
        rows = slice(self.activations, None)
        sums[rows] += rank + 1
        if step == 0:
            zeros = slice(self.activations, self.activations + 4)
            partials[zeros, 5:], sums[zeros] = 0, 7


class Untold(Fleet):
    """A log whose topology says only that all ranks are data parallel, as a plain script's does."""

    def place(self, rank):
        return Place(rank, self.ranks, {"dp": (rank, self.ranks)})

    def template_of(self, rank):
        return rank % 2  # shards that the log does not tell


@pytest.mark.parametrize("kind", [Unreduced, Sharded, Untold])
def test_what_differs_by_right_is_no_finding(kind, tmp_path, capsys):
    fleet = kind(data=6, tensor=1, pipeline=1, steps=4, parameters=4, activations=2)
    for rank in range(fleet.ranks):
        write_through_sink(fleet, tmp_path, rank)
    code = main(["judge", "--fleet", str(tmp_path)])
    told = capsys.readouterr().out
    assert "nothing found" in told
    assert code == (3 if kind is Sharded else 0)
    assert ("no rank has a replica" in told) == (kind is Sharded)
    assert ("equal parameters at the first step" in told) == (kind is Untold)


def test_replicas_that_the_log_does_not_tell_are_found_by_their_parameters(tmp_path, capsys):
    fleet = Untold(data=8, tensor=1, pipeline=1, steps=5, parameters=4, activations=2, planted=Planted(parted=(5, 2)))
    for rank in range(fleet.ranks):
        write_through_sink(fleet, tmp_path, rank)
    code, (finding,) = judged(tmp_path, capsys)
    assert (code, finding["ranks"], finding["step"]) == (1, [5], 2)
    assert "left 3 replicas" in finding["message"]


def test_two_replicas_that_part_are_both_named(tmp_path, capsys):
    fleet = Fleet(data=2, tensor=1, pipeline=1, steps=4, parameters=4, activations=2, planted=Planted(parted=(1, 2)))
    for rank in range(2):
        write_through_sink(fleet, tmp_path, rank)
    code, (finding,) = judged(tmp_path, capsys)
    assert (code, finding["ranks"], finding["step"]) == (1, [0, 1], 2)
    assert "which rank is wrong cannot be told" in finding["message"]


class Joined(Fleet):
    """A NaN that the log shows only in the reduced gradients, alike on all ranks."""

    def first_nan(self, rank):
        return self.activations


def test_a_nan_that_all_ranks_have_alike_is_blamed_on_none(tmp_path, capsys):
    fleet = Joined(data=4, tensor=1, pipeline=1, steps=3, parameters=3, activations=2, planted=Planted(nan=(2, 1)))
    for rank in range(4):
        write_through_sink(fleet, tmp_path, rank)
    code, (finding,) = judged(tmp_path, capsys)
    assert (code, finding["ranks"], finding["step"]) == (1, [0, 1, 2, 3], 1)
    assert "cannot be told" in finding["message"]
    assert "unreduced: true" in finding["next"]


def test_a_damaged_file_costs_its_rank_alone(tmp_path, capsys):
    write_fleet(replace(SHAPE, data=4, tensor=1, pipeline=1), tmp_path)
    (segment,) = find_segments(tmp_path / "rank2")
    segment.write_bytes(segment.read_bytes()[:-9])
    code, (finding,) = judged(tmp_path, capsys)
    assert code == 1
    assert finding["rule"] == "fleet_files"
    assert "rank2/metrics-000000.parquet" in finding["message"]


def test_a_rank_that_left_nothing_or_less_is_told(tmp_path, capsys):
    write_fleet(replace(SHAPE, data=4, tensor=1, pipeline=1, steps=6, planted=Planted(stopped=(1, 3))), tmp_path, whole=True)
    shutil.rmtree(tmp_path / "rank2")
    code, found = judged(tmp_path, capsys)
    assert code == 1
    assert [(finding["rule"], finding["ranks"]) for finding in found] == [("fleet_steps", [1]), ("fleet_files", [2])]
    assert "rank 2 left no run log, of 4: nothing is known of them" in found[1]["message"]
    main(["judge", str(tmp_path)])
    assert "6 steps of 3 ranks" in (said := capsys.readouterr().out)
    assert "Of rank 2 nothing is there. Rank 1 had fewer steps: 3" in said
    for rank in (1, 3):
        shutil.rmtree(tmp_path / f"rank{rank}")
    main(["judge", "--fleet", str(tmp_path)])
    assert "3 of the job's ranks left no run log" in capsys.readouterr().out


def test_a_folder_without_columns_is_one_sentence(tmp_path, capsys):
    assert main(["judge", "--fleet", str(tmp_path)]) == 3
    assert "holds no run log in columns" in capsys.readouterr().err


def test_runs_compact_stores_replicas_once_and_changes_no_answer(tmp_path, capsys):
    fleet = replace(SHAPE, data=4, pipeline=1, planted=Planted(parted=(4, 3)))
    for rank in range(fleet.ranks):
        write_through_sink(fleet, tmp_path, rank)
    before = judged(tmp_path, capsys)
    alone = main(["judge", str(tmp_path / "rank6"), "--json"]), capsys.readouterr().out
    sizes = {rank: find_segments(tmp_path / f"rank{rank}")[0].stat().st_size for rank in range(fleet.ranks)}
    assert main(["runs", str(tmp_path), "--compact"]) == 0
    capsys.readouterr()
    smaller = [rank for rank, size in sizes.items() if find_segments(tmp_path / f"rank{rank}")[0].stat().st_size < size]
    assert smaller == [2, 3, 4, 5, 6, 7]
    assert judged(tmp_path, capsys) == before
    assert (main(["judge", str(tmp_path / "rank6"), "--json"]), capsys.readouterr().out) == alone
    assert before[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("faulty", ["stored once"], indirect=True)
def test_ray_gives_the_answer_of_one_machine(faulty, cluster, capsys):
    folder, _ = faulty
    before = judged(folder, capsys)
    code = main(["judge", "--fleet", "--ray", str(folder), "--json"])
    assert (code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]) == before


@pytest.mark.parametrize("faulty", ["stored once"], indirect=True)
def test_the_shares_do_not_matter(faulty, monkeypatch, capsys):
    folder, _ = faulty
    before = judged(folder, capsys)
    monkeypatch.setattr(survey_module, "TOGETHER", 23)
    monkeypatch.setattr(survey_module, "shares_of", lambda groups: groups_module.shares_of(groups, 11))
    assert judged(folder, capsys) == before
