"""What messages for users of other tools advise: each command and each name in them is there."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainprobe
import trainprobe.pytorch as classic
from trainprobe.cli import VERBS
from trainprobe.engine.plan.legacy import dump as legacy
from trainprobe.engine.storage.dumps import TensorStore
from trainprobe.errors import PlanError

PACKAGE = Path(trainprobe.__file__).parent
_COMMAND = re.compile(r"`trainprobe ([a-z][^`{}\n]*)`")
_NAME = re.compile(r"\btrainprobe((?:\.[A-Za-z_]\w*)+)")


def _texts() -> list[tuple[str, str]]:
    """Return (file, what is said in it), with strings that stand beside each other joined."""
    found = ((path, path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py")))
    return [(str(path.relative_to(PACKAGE)), re.sub(r'"\s*\n\s*f?"', "", text)) for path, text in found]


def test_each_command_that_a_message_names_is_one() -> None:
    missing: list[str] = []
    seen = 0
    for file, text in _texts():
        for said in _COMMAND.findall(text):
            words = said.replace("'", "").split()
            seen += 1
            if " ".join(words[:2]) not in VERBS and words[0] not in VERBS:
                missing.append(f"{file}: trainprobe {said}")
    assert seen > 50
    assert not missing


def test_each_name_that_a_message_for_other_tools_gives_can_be_imported() -> None:
    said = [*legacy._UNUSED.values(), *(text for _, text in legacy._TRANSLATED.values()), classic._DISPATCH]
    names = {match for text in said for match in _NAME.findall(text)}
    assert ".CompareWithCPU" in names
    for name in names:
        module, _, last = f"trainprobe{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


@pytest.mark.parametrize("key", ["host", "port", "nfs_path", "tls_path", "online_run_ut"])
def test_keys_of_the_online_check_point_to_the_server(key: str) -> None:
    config = {"task": "tensor", "tensor": {key: "x"}}
    _, notes = legacy.translate(config, "config.json")
    assert any("trainprobe op-check serve" in note and "server: HOST:PORT" in note for note in notes)
    from trainprobe.op_check.plan import validate

    assert validate({"server": "127.0.0.1:7700"}).server == "127.0.0.1:7700"  # as the note says


def test_the_dispatch_mode_points_to_what_does_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ImportError, match=re.escape("with trainprobe.CompareWithCPU()")):
        _ = classic.online_dispatch.PtdbgDispatch
    with trainprobe.CompareWithCPU():  # as the message says
        torch.tanh(torch.ones(3))
    assert "tanh.0 (forward) succeeds" in capsys.readouterr().out


def test_names_that_scripts_import() -> None:
    from trainprobe import ModuleInfo, open_module_tracker

    root = ModuleInfo("GPT", None)
    assert ModuleInfo("Linear", root, is_leaf=True).full_name() == "GPT/Linear(forward)"
    assert callable(open_module_tracker)
    done = subprocess.run(
        [sys.executable, "-c", "from trainprobe import ProbeCallback"], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    places = re.findall(r"trainprobe\.integrations\.(\w+)", done.stderr)
    assert done.returncode == 1 and "transformers" in places, done.stderr
    assert all((PACKAGE / "integrations" / f"{name}.py").is_file() for name in places)
    code = (
        "import lightning, sys; sys.modules.pop('transformers', 0); import trainprobe as t; print(t.ProbeCallback.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "trainprobe.integrations.lightning", done.stderr


def test_a_misspelt_key_of_the_other_tool_is_suggested(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"task": "statistics", "dmp_path": "x"}')
    with pytest.raises(PlanError, match="dump_path"):
        trainprobe.PrecisionDebugger(path)


def test_a_refused_server_says_its_sentence_alone(tmp_path: Path) -> None:
    for given in (["--folder", str(tmp_path / "absent")], ["--listen", "0.0.0.0:0"], ["--listen", "nonsense"]):
        command = [sys.executable, "-m", "trainprobe", "op-check", "serve", *given, "--output", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode != 0
        assert "Warning" not in done.stderr, shlex.join(command)
        assert "Traceback" not in done.stderr


def test_a_rank_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trainprobe.CompareWithCPU(enable_ranks=[7]):
        torch.tanh(torch.ones(3))
    assert "nothing was judged: the run has rank 0 alone, and rank is [7]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("isend", ["send"]),
        ("Distributed.isend.0.forward", ["Distributed.send.0.forward"]),
        ("_reduce_scatter_base", ["reduce_scatter_tensor"]),
        ("distributed", ["Distributed"]),
        ("batch_isend_irecv", ["send", "recv"]),
        ("linear", ["linear"]),
    ],
)
def test_old_names_of_collectives_select_what_is_recorded(name: str, here: list[str]) -> None:
    fields, notes = legacy.translate({"task": "statistics", "statistics": {"list": [name]}}, "config.json")
    assert list(fields["entries"]) == here
    assert any("recorded as" in note for note in notes) == (here != [name])


COLLECTIVES = """
import json, os, sys
import torch, torch.distributed as dist, trainprobe
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
plan = {"level": "L1", "task": "tensor", "step": [0], "output": sys.argv[1], "console": False, "ops": ["**Distributed**"]}
with trainprobe.watch(layer, optimizer, **plan) as probe:
    with probe.step():
        t, parts = torch.ones(4), [torch.empty(4)]
        dist.all_reduce(t)
        dist.all_gather(parts, t)
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
print(json.dumps([f.message for f in probe.findings]))
"""


def test_what_collectives_give_is_stored_and_their_pattern_matches(tmp_path: Path) -> None:
    """Case c08."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", COLLECTIVES, str(tmp_path / "out"), port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "match" not in done.stdout
    folder = tmp_path / "out/step0/rank0"
    data = json.loads((folder / "dump.json").read_text())["data"]
    stored = TensorStore(folder)
    for name in ("all_reduce", "all_gather"):
        entry = next(value for key, value in data.items() if f"Distributed.{name}.0" in key)
        (output,) = entry["output"]
        output = output[0] if isinstance(output, list) else output  # a list of lists, a list for each tensor that goes in
        assert stored.array(output["data_name"]).tolist() == [1.0] * 4
