"""Ranks and steps that are compared in other processes, on this machine or on Ray, give the answer of one process."""

from __future__ import annotations

import json

import pytest

from benchmarks.dump_compare.runs import Way, train
from trainprobe.cli import main
from trainprobe.dump_compare import parallel_ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two steps of three runs: another number of threads, another activation."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {"a": Way(), "b": Way(threads=2), "c": Way(change="activation")}
    return {name: str(train(folder / name, "conv", way, level="mix", summary="both")) for name, way in ways.items()}


def answers(runs, folder, capsys, *more: str) -> list[object]:
    """Exit codes, what is printed, and the JSON of all calls."""
    found: list[object] = []
    for other in "bc":
        path = folder / f"{other}{len(list(folder.iterdir()))}.json"
        found += [main(["dump-compare", runs["a"], runs[other], *more]), capsys.readouterr().out]
        found += [
            main(["dump-compare", runs["a"], runs[other], "--json", str(path), "-q", *more]),
            json.loads(path.read_bytes()),
        ]
        capsys.readouterr()
    return found


def test_processes_give_the_answer_of_one(runs, monkeypatch, tmp_path, capsys):
    before = answers(runs, tmp_path, capsys)
    used: list[int] = []
    monkeypatch.setattr(parallel_ranks, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(parallel_ranks, "cores", lambda: used.append(1) or 2)
    assert answers(runs, tmp_path, capsys) == before
    assert used
    assert before[0] in (0, 1) and before[4] == 2


@pytest.mark.slow
def test_ray_gives_the_answer_of_one_process(runs, cluster, tmp_path, capsys):
    before = answers(runs, tmp_path, capsys)
    assert answers(runs, tmp_path, capsys, "--ray") == before
