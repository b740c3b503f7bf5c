"""Files for the two TensorBoard pages of mindstudio-probe, opened by the pages' own services, which answer with our numbers."""

import json
import math
import sqlite3
import subprocess
from collections import defaultdict
from pathlib import Path

import orjson
import pytest
import tensorboard

from tests.distributed.launch import launch
from tests.interop.peer import PEER, needs_peer
from trainprobe.cli import main
from trainprobe.engine.core.step_data import entry_name, slots
from trainprobe.engine.storage.dumps import read
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.trend_db import STATISTICS, limited, names_of

INDEX = {"identical": 0, "rounding": 0, "carried": 0, "suspicious": 0.5, "bug": 1}
HEADS = {"max": "Max", "min": "Min", "mean": "Mean", "norm": "Norm"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with the two dumps of two ranks, and both files."""
    folder = tmp_path_factory.mktemp("plugins")
    folder.chmod(0o750)
    launch(Path(__file__).with_name("train_for_plugins.py"), 2, str(folder))
    a, b = str(folder / "a"), str(folder / "b")
    main(["dump-compare", a, b, "-q", "--vis", str(folder / "out.vis.db"), "--json", str(folder / "all.json")])
    assert main(["export", a, "--trend", str(folder / "run.trend.db")]) == 0
    return folder


@pytest.fixture(scope="module")
def answers(files):
    child = Path(__file__).with_name("plugin_answers.py")
    packages = str(Path(tensorboard.__file__).parents[1])
    command = [PEER, str(child), packages, str(files / "out.vis.db"), str(files / "run.trend.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("ANSWERS") + len("ANSWERS") :])


@needs_peer
def test_the_graph_page_lists_every_call_of_every_rank_with_its_verdict(files, answers):
    graph = answers["graph"]
    assert graph["loaded"] == {"success": True}
    assert (graph["config"]["data"]["steps"], graph["config"]["data"]["ranks"]) == ([0, 1], [0, 1])
    assert not graph["config"]["data"]["isSingleGraph"]
    whole = orjson.loads((files / "all.json").read_bytes())["calls"]
    for at in graph["graphs"]:
        ours = [call for call in whole if (call["step"], call["rank"]) == (at["step"], at["rank"])]
        assert len(ours) > 40
        for source, side in (("NPU", "a"), ("Bench", "b")):
            listed = at["nodes"]["data"][f"{source.lower()}NodeList"]
            assert sorted(listed) == sorted(["DefaultModel", *(call[side] for call in ours)])
            told = {name: info["data"]["precision_index"] for name, info in at[source].items() if name != "DefaultModel"}
            assert told == {call[side]: INDEX[call["verdict"]] for call in ours}
        assert len(at["matched"]["data"]["npuMatchNodes"]) == len(ours) + 1
    assert graph["above"][-1] == "DefaultModel"
    assert graph["above"][1] == "Module.1.GELU.forward.0"


@needs_peer
def test_every_number_of_every_node_of_both_sides_is_that_of_the_dump_and_no_other_is_there(files, answers):
    count = 0
    for at in answers["graph"]["graphs"]:
        for source, side in (("NPU", "a"), ("Bench", "b")):
            data = read(files / side / f"step{at['step']}/rank{at['rank']}")
            ours: dict[str, list[dict[str, float]]] = defaultdict(list)
            for call in data.calls:
                ours[entry_name(call)] += [numbers_of(data, value) for _, value in slots(call)]
            told: dict[str, list[dict[str, float]]] = {}
            for name, info in at[source].items():
                values = [*info["input_data"].values(), *info["output_data"].values()]
                told[name] = [{each: float(value[HEADS[each]]) for each in HEADS if HEADS[each] in value} for value in values]
            parameters = {name for name in told if name.startswith("Parameter.")}
            assert {name: in_order(of) for name, of in told.items() if name not in {"DefaultModel", *parameters}} == {
                name: in_order(of) for name, of in ours.items()
            }
            held = [numbers_of(data, value) for call in data.states for value in call.params.values()]
            shown = [each for name in parameters for each in told[name]]
            assert all(each in shown for each in held), "of a parameter, what the optimizer is given and makes"
            assert all(each in held for each in shown)
            count += sum(map(len, told.values()))
    assert count > 750


def numbers_of(data, value):
    return {name: data.finished[name][value.row] for name in HEADS if value.row >= 0 and name in data.finished}


def in_order(numbers):
    return sorted(tuple(sorted(each.items())) for each in numbers)


@needs_peer
def test_what_differs_has_its_reason(answers):
    told = answers["graph"]["graphs"][0]["NPU"]["Functional.gelu.0.forward"]["output_data"]
    assert "approximate is 'none' in A and 'tanh' in B" in told["Functional.gelu.0.forward.output.0"]["Reason"]


@needs_peer
def test_calls_with_infinities_stand_in_the_lists_of_overflows(answers):
    for at in answers["graph"]["graphs"]:
        listed = {each["name"].partition(".")[2]: each["status"] for each in at["overflows"]["data"]}
        made = {"exp.0.forward": "critical", "mul.2.forward": "high", "minimum.0.forward": "medium"}
        assert listed == (made if at["rank"] == 1 else {})
        assert answers["graph"]["config"]["data"]["overflowCheck"]


@needs_peer
def test_jumps_lead_along_collectives_and_messages_to_the_other_rank(answers):
    for at in answers["graph"]["graphs"]:
        other = str(1 - at["rank"])
        for source in ("NPU", "Bench"):
            found = {
                name.partition(".")[2]: info["matched_distributed"]
                for name, info in at[source].items()
                if name.startswith("Distributed.")
            }
            assert len(found) == 6
            mine, theirs = ("send", "recv") if at["rank"] == 0 else ("recv", "send")
            message = found.pop(f"{mine}.0.forward")
            assert message["communications_type"] == ("send" if at["rank"] == 0 else "receive")
            assert message["nodes_info"] == {other: ["NaN", f"Distributed.{theirs}.0.forward"]}
            for name, jump in found.items():
                assert jump == {
                    "communications_type": "send_receive",
                    "nodes_info": {other: ["NaN", f"Distributed.{name}"]},
                }
        assert all(not info["matched_distributed"] for name, info in at["NPU"].items() if not name.startswith("Distributed."))


@needs_peer
def test_the_trend_page_answers_with_every_number_of_every_rank(files, answers):
    trend = answers["trend"]
    assert trend["ends"] == {"max_rank": 1, "min_step": 0, "max_step": 1}
    ours = {}
    for frame in read_frames(files / "a"):
        for number, value in zip(frame.at.tolist(), frame.values.tolist(), strict=True):
            series = frame.table.series[number]
            if series.statistic in STATISTICS and series.address.phase != "recompute" and not math.isnan(value):
                metric, target = names_of(series)
                ours[metric, STATISTICS[series.statistic], frame.place.rank, frame.step, target] = limited(value)
    told = {
        (row["metric"], row["statistic"], row["rank"], row["step"], row["target_name"]): row[row["statistic"]]
        for row in trend["rows"]
        if row[row["statistic"]] is not None
    }
    assert told == ours
    assert {key[2] for key in ours} == {0, 1}
    assert len(ours) > 500


def test_both_files_are_whole_or_not_there_and_have_names_that_the_pages_open(files, tmp_path, capsys):
    with sqlite3.connect(files / "out.vis.db") as database:
        links = database.execute(
            "SELECT matched_node_link FROM tb_nodes WHERE node_name = 'Functional.gelu.0.forward'"
        ).fetchall()
    assert [json.loads(link)[0] for (link,) in links] == ["DefaultModel"] * 8, "two sides of two steps and ranks"
    assert (files / "out.vis.db").stat().st_mode & 0o022 == 0
    assert main(["export", str(files / "a"), "--trend", str(tmp_path / "run.db")]) == 3
    assert "end with .trend.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert limited(float("inf")) == 1e9 + 1
    assert limited(float("nan")) is None
    assert limited(-2e9) == -1e9
