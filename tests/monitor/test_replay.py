"""The same rules give the same findings live, offline and after a restart."""

import numpy as np
import pytest
import torch
from frames_by_hand import frame as make_frame
from frames_by_hand import grads
from small_training import train
from watched_training import RULES, watched_training

from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.errors import FormatError
from trainprobe.monitor.findings import in_order
from trainprobe.monitor.frames import SeriesTable
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import Watcher, judge_frames, load_state, save_state

torch.set_num_threads(1)


def test_judging_the_record_log_gives_the_findings_of_the_live_run(tmp_path):
    live = watched_training(tmp_path / "run", ["jsonl"])
    offline = judge_frames(read_frames(tmp_path / "run"), make_rules(RULES))
    assert {"spike", "nonfinite"} <= {f.rule for f in live}
    assert offline == live


def test_judging_the_csv_finds_the_same_places_and_steps(tmp_path):
    live = watched_training(tmp_path / "run", ["csv"])
    offline = judge_frames(read_frames(tmp_path / "run"), make_rules(RULES))
    key = lambda f: (f.rule, f.step, f.site.name if f.site else None)  # noqa: E731
    assert [key(f) for f in offline if f.rule != "dead"] == [key(f) for f in live if f.rule != "dead"]


@pytest.mark.parametrize("restart_at", [1, 30, 45])
def test_a_restart_changes_no_finding(tmp_path, restart_at):
    frames = list(train(steps=60, tamper_loss=lambda step, loss: loss * (100 if step in (40, 55) else 1)))
    whole = Watcher(make_rules(RULES))
    expected = [f for frame in frames for f in whole.judge(frame)]
    first = Watcher(make_rules(RULES))
    found = [f for frame in frames[:restart_at] for f in first.judge(frame)]
    save_state(first, tmp_path / "state.json")
    second = Watcher(make_rules(RULES))
    assert load_state(second, tmp_path / "state.json")
    found += [f for frame in frames[restart_at:] for f in second.judge(frame)]
    assert expected
    assert found == expected


def test_a_restart_with_tracks_in_another_order_changes_no_finding(tmp_path):
    def frames(order, steps):
        table = SeriesTable()
        return [
            make_frame(s, table, *grads({n: 90.0 if (s, n) == (80, "b") else 1.0 + s % 5 / 100 for n in order})) for s in steps
        ]

    first = Watcher(make_rules({"spike": True}))
    for one in frames("abc", range(70)):
        assert first.judge(one) == []
    save_state(first, tmp_path / "state.json")
    second = Watcher(make_rules({"spike": True}))
    load_state(second, tmp_path / "state.json")
    found = [f for one in frames("cba", range(70, 90)) for f in second.judge(one)]
    assert [(f.step, f.site.name) for f in found if f.rule == "spike"] == [(80, "b")]


def test_a_file_that_is_no_state_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "state.json").write_text('{"format": 1, "rules": {"spike": {"keys": 3}}}')
    with pytest.raises(FormatError, match="remove the file to begin anew"):
        load_state(Watcher(make_rules(None)), tmp_path / "state.json")


def test_a_state_holds_no_more_after_many_steps_than_after_few():
    watcher, table, sizes = Watcher(make_rules(RULES)), SeriesTable(), []
    for step in range(1200):
        watcher.judge(make_frame(step, table, *grads({"a": 1.0 + step % 7, "b": 2.0}), loss=1.0))
        if step in (300, 1199):
            sizes.append(sum(a.nbytes for m in watcher.memories.values() for a in m.arrays.values()))
    assert sizes[0] == sizes[1]


def test_findings_of_a_run_are_read_back_as_they_were_written(tmp_path):
    from trainprobe.engine.core.records import Finding, Place, Site
    from trainprobe.engine.plan.loading import load_plan
    from trainprobe.engine.storage.dumps.findings_file import open_findings

    told = Finding(
        "spike", "warning", "a jump", 7, Place(1, 4, {"dp": (1, 4)}), Site("parameter", "w", "grad"), 3.0, 1.0, None, "look"
    )
    sink = open_findings(load_plan(None, output=tmp_path), Place(1, 4))
    sink.findings([told])
    sink.close()
    assert read_findings(tmp_path) == [told]


def test_a_folder_without_a_run_is_an_error_that_says_what_was_expected(tmp_path):
    with pytest.raises(FormatError, match=r"holds no run: no metrics-\*\.parquet, no records\.jsonl"):
        list(read_frames(tmp_path))
    with pytest.raises(FormatError, match="does not exist"):
        list(read_frames(tmp_path / "none"))


def test_frames_keep_the_order_in_which_values_were_seen():
    table = SeriesTable()
    one = make_frame(0, table, *grads({"z": 1.0, "a": 2.0}), loss=3.0)
    assert [table.series[t].address.name for t in one.at] == ["z", "a", "loss"]
    assert np.array_equal(one.values, [1.0, 2.0, 3.0])


def test_of_a_nan_that_spread_over_ranks_the_rank_where_it_arose_comes_first():
    from frames_by_hand import value

    rules = make_rules(["nonfinite"])
    nan = float("nan")
    forward = [value("forward", "module", "a", "input.0", norm=1.0), value("forward", "module", "a", "output", norm=nan)]
    frames = [
        make_frame(0, SeriesTable(), *grads({"w": nan}), rank=0),
        make_frame(0, SeriesTable(), *forward, *grads({"w": nan}), rank=1),
    ]
    found = in_order(judge_frames(frames, rules))
    assert [(f.place.rank, f.site.name) for f in found] == [(1, "a"), (0, "w")]
