"""Files with predictable names: whole or not at all, never through a link; a damaged one costs a sentence."""

from __future__ import annotations

import csv
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainprobe
from trainprobe.engine.plan.control import ControlFile
from trainprobe.engine.storage.safe_files import read_bounded, set_aside, write_whole
from trainprobe.errors import FormatError, OutputError


def train(output, steps=3, loss_name="loss", **plan):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    settings = {"level": "off", "monitor": True, "output": output, "on_error": "continue"} | plan
    with trainprobe.watch(model, optimizer, **settings) as probe:
        for _ in range(steps):
            with probe.step():
                loss = model(torch.ones(2, 4)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                probe.note(loss_name, loss)
    return probe


def test_a_file_is_written_whole_and_for_this_user_alone(tmp_path):
    path = tmp_path / "state.json"
    write_whole(path, b"first")
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_file_that_is_mounted_by_itself_is_written_over(tmp_path):
    """As a container mounts a single file: no rename reaches it."""
    for name in ("behind", "pack.zip"):
        (tmp_path / name).write_bytes(b"an older and longer one")
    code = "import sys, pathlib; from trainprobe.engine.storage.safe_files import write_whole; "
    code += "write_whole(pathlib.Path(sys.argv[1]), b'new')"
    script = f'mount --bind "$1/behind" "$1/pack.zip" && exec "$2" -c "{code}" "$1/pack.zip"'
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", tmp_path, sys.executable], capture_output=True, text=True, check=False
    )
    if "Operation not permitted" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"this machine lets nobody mount: {ran.stderr}")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "behind").read_bytes() == b"new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["behind", "pack.zip"]


def test_what_lies_behind_a_link_is_neither_written_nor_read(tmp_path):
    (tmp_path / "treasure").write_bytes(b"treasure")
    link = tmp_path / "state.json"
    link.symlink_to(tmp_path / "treasure")
    with pytest.raises(OSError, match="symbolic links"):
        read_bounded(link, 100)
    write_whole(link, b"new")
    assert (tmp_path / "treasure").read_bytes() == b"treasure"
    assert link.read_bytes() == b"new" and not link.is_symlink()


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="no regular file"):
        read_bounded(tmp_path / "pipe", 100)
    with pytest.raises(FormatError, match=f"{tmp_path} is no regular file"):
        read_bounded(tmp_path, 100)
    (tmp_path / "large").write_bytes(b"x" * 101)
    with pytest.raises(FormatError, match="101 bytes, and more than 100 are not read"):
        read_bounded(tmp_path / "large", 100)
    for name in ("large.damaged", "large.damaged2"):
        (tmp_path / "large").write_bytes(b"x")
        assert set_aside(tmp_path / "large").name == name


@pytest.mark.parametrize("what", ["link", "pipe", "large"])
def test_control_yaml_is_read_only_if_it_is_a_small_regular_file(tmp_path, what):
    path = tmp_path / "control.yaml"
    if what == "link":
        (tmp_path / "elsewhere.yaml").write_text("step: [3]")
        path.symlink_to(tmp_path / "elsewhere.yaml")
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("# " + "x" * (64 << 10))
    control = ControlFile(tmp_path, 1, 0, lambda words: [words])
    assert control.look(0) is None
    path.unlink()
    path.write_text("step: [3]")
    assert control.look(1) == {"step": [3]}


def test_a_log_whose_name_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "treasure").write_bytes(b"treasure")
    (tmp_path / "out/rank0").mkdir(parents=True)
    (tmp_path / "out/rank0/records.jsonl").symlink_to(tmp_path / "treasure")
    with pytest.raises(OutputError, match="symbolic links"):
        train(tmp_path / "out", on_existing="continue", sinks=["jsonl"])
    (tmp_path / "out/rank0/metrics.arrow").symlink_to(tmp_path / "treasure")
    train(tmp_path / "out", on_existing="continue")
    assert not (tmp_path / "out/rank0/metrics.arrow").exists()
    assert (tmp_path / "treasure").read_bytes() == b"treasure"


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"format": 99}', b'{"format": 1, "rules": {"drift": 3}}'])
def test_a_damaged_state_is_set_aside_and_the_run_goes_on(tmp_path, capsys, text):
    train(tmp_path / "out")
    state = tmp_path / "out/rank0/monitor_state.json"
    assert json.loads(state.read_bytes())["format"] == 1
    state.write_bytes(text)
    probe = train(tmp_path / "out", on_existing="continue")
    told = capsys.readouterr().err
    assert probe.guard.tripped is None
    assert told.count("the rules begin anew, because their state cannot be read") == 1
    assert (state.parent / "monitor_state.json.damaged").read_bytes() == text
    assert json.loads(state.read_bytes())["format"] == 1


def test_a_disk_that_is_full_when_the_state_is_written_costs_a_sentence(tmp_path):
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests.test_safe_files import train
from trainprobe.monitor import watcher
import orjson
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
original = watcher.save_state
def with_a_full_disk(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    original(*arguments)
watcher.save_state = with_a_full_disk
probe = train({str(tmp_path / "out")!r})
assert probe.guard.tripped is None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "monitor_state.json could not be written (File too large)" in done.stderr
    assert not list((tmp_path / "out/rank0").glob("*.partial"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_names_that_a_spreadsheet_would_calculate_are_defused(tmp_path):
    train(tmp_path / "out", loss_name="=1+2", sinks=["csv"])
    with (tmp_path / "out/rank0/metrics.csv").open(newline="") as file:
        names = {row["name"] for row in csv.DictReader(file)}
    assert "'=1+2" in names and not [name for name in names if name.startswith(("=", "+", "-", "@"))]
    numbers = (tmp_path / "out/rank0/metrics.csv").read_text()
    assert ",-" in numbers or "e-" in numbers  # numbers stay numbers
