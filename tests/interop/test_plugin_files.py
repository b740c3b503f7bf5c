"""Files for the two TensorBoard pages of mindstudio-probe, opened by the pages' own services, which answer with our numbers."""

import json
import sqlite3
import subprocess
from pathlib import Path

import orjson
import pytest
import tensorboard

from tests.dump_compare.small_runs import run
from tests.interop.peer import PEER, needs_peer
from trainprobe.cli import main
from trainprobe.engine.core.step_data import entry_name
from trainprobe.engine.storage.dumps import read
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.trend_db import limited, names_of


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    folder.chmod(0o750)
    a, b = run(folder / "a", "", level="mix", monitor=True), run(folder / "b", "gelu", level="mix")
    main(["dump-compare", str(a), str(b), "-q", "--vis", str(folder / "out.vis.db"), "--json", str(folder / "all.json")])
    assert main(["export", str(a), "--trend", str(folder / "run.trend.db")]) == 0
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
def test_the_graph_page_lists_every_call_with_its_verdict_and_numbers(files, answers):
    graph = answers["graph"]
    assert graph["loaded"] == {"success": True}
    assert graph["config"]["data"]["steps"] == [0, 1]
    assert not graph["config"]["data"]["isSingleGraph"]
    ours = [call for call in orjson.loads((files / "all.json").read_bytes())["calls"] if call["step"] == 0]
    assert set(graph["nodes"]["data"]["npuNodeList"]) == {"DefaultModel", *(call["a"] for call in ours)}
    assert len(graph["matched"]["data"]["npuMatchNodes"]) == len(ours) + 1
    index = {"identical": 0, "rounding": 0, "carried": 0, "suspicious": 0.5, "bug": 1}
    assert {call["a"]: graph["info"][call["a"]]["data"]["precision_index"] for call in ours} == {
        call["a"]: index[call["verdict"]] for call in ours
    }
    assert graph["above"][-1] == "DefaultModel"
    assert graph["above"][1] == "Module.layers.1.act.GELU.forward.0"
    data = read(files / "a/step0/rank0")
    gelu = next(call for call in data.calls if entry_name(call) == "Functional.gelu.1.forward")
    told = graph["info"]["Functional.gelu.1.forward"]["output_data"]["Functional.gelu.1.forward.output.0"]
    row = gelu.out[0].row if isinstance(gelu.out, list) else gelu.out.row
    assert {name: float(told[head]) for name, head in (("max", "Max"), ("mean", "Mean"), ("norm", "Norm"))} == {
        name: data.finished[name][row] for name in ("max", "mean", "norm")
    }
    assert "approximate is 'none' in A and 'tanh' in B" in told["Reason"]


@needs_peer
def test_the_trend_page_answers_with_every_norm_of_the_run(files, answers):
    trend = answers["trend"]
    assert trend["ends"] == {"max_rank": 0, "min_step": 0, "max_step": 1}
    assert "norm" in trend["metrics"]["parameter_grad"].split(",")
    ours = {}
    for frame in read_frames(files / "a"):
        for number, value in zip(frame.at.tolist(), frame.values.tolist(), strict=True):
            series = frame.table.series[number]
            if series.statistic == "norm" and names_of(series)[0] == "parameter_grad":
                ours[frame.step, names_of(series)[1]] = value
    assert {(row["step"], row["target_name"]): row["norm"] for row in trend["rows"]} == ours
    assert len(ours) > 30


def test_both_files_are_whole_or_not_there_and_have_names_that_the_pages_open(files, tmp_path, capsys):
    with sqlite3.connect(files / "out.vis.db") as database:
        links = database.execute(
            "SELECT matched_node_link FROM tb_nodes WHERE node_name = 'Functional.gelu.1.forward'"
        ).fetchall()
    assert [json.loads(link)[0] for (link,) in links] == ["DefaultModel"] * 4, "two sides of two steps"
    assert (files / "out.vis.db").stat().st_mode & 0o022 == 0
    assert main(["export", str(files / "a"), "--trend", str(tmp_path / "run.db")]) == 3
    assert "end with .trend.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert limited(float("inf")) == 1e9 + 1
    assert limited(float("nan")) is None
    assert limited(-2e9) == -1e9
