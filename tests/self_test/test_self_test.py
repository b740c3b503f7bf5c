"""The self-test runs on the CPU, leaves one file, and every check that can fail does where something is wrong."""

import json
import subprocess
import sys
import zipfile

import pytest
import torch
from rich.console import Console

from trainprobe.cli import main
from trainprobe.self_test import checks, kernels
from trainprobe.self_test.checks import TestedMachine
from trainprobe.self_test.command import run_child
from trainprobe.self_test.training import Trained

PASSED = {"device", "repeats", "same bits", "one transfer a step", "kernels", "operators", "dump"}
PASSED |= {"planted infinity", "black box", "config check", "cost"}


@pytest.fixture
def machine(tmp_path):
    return TestedMachine("cpu", True, tmp_path, Trained({"loss of step 0": b"1"}), repeats=True)


def test_everything_holds_on_the_cpu_and_one_file_is_left(tmp_path):
    target = tmp_path / "report.zip"
    command = [sys.executable, "-m", "trainprobe", "self-test", "--quick", "-o", target]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(target) as archive:
        assert set(archive.namelist()) == {"report.txt", "report.json", "log.txt"}
        report, text = json.loads(archive.read("report.json")), archive.read("report.txt").decode()
    outcomes = {each["check"]: each["outcome"] for each in report}
    assert {check for check, outcome in outcomes.items() if outcome == "pass"} == PASSED
    assert "FAIL" not in outcomes.values()
    assert f"send back {target}" in text
    seconds = {each["check"]: each for each in report}["cost"]["numbers"]["seconds"]
    assert set(seconds) == {"no tool", "L0 statistics", "mix statistics", "monitor", "audit"}
    assert [path.name for path in tmp_path.iterdir()] == ["report.zip"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_fails_and_still_leaves_the_file(tmp_path, capsys):
    target = tmp_path / "report.zip"
    assert main(["self-test", "--quick", "--device", "cuda", "-o", str(target)]) == 1
    assert "FAIL    device: " in capsys.readouterr().out
    with zipfile.ZipFile(target) as archive:
        assert [each["outcome"] for each in json.loads(archive.read("report.json"))] == ["FAIL"]
    assert main(["self-test", "--device", "tpu"]) == 3
    assert main(["self-test", "-o", str(target)]) == 3  # it is there already


def test_a_process_that_dies_is_a_check_that_failed(tmp_path):
    (tmp_path / "work").write_text("a file where the folder should be")
    (result,) = run_child("cpu", True, tmp_path, 60, Console(quiet=True))
    assert (result.check, result.outcome) == ("start", "FAIL")
    assert "ended with 1" in result.sentence
    assert any("FileExistsError" in line for line in result.details)


def test_a_check_that_hangs_is_ended(tmp_path, monkeypatch):
    stuck = tmp_path / "stuck"
    stuck.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    (result,) = run_child("cpu", True, tmp_path, 1, Console(quiet=True))
    assert "did not answer within 1 seconds" in result.sentence


def test_bits_that_change_are_told_with_their_plan(machine, monkeypatch):
    trained = {"L0": Trained({"loss of step 0": b"1"}), "monitor": Trained({"loss of step 0": b"2"})}
    monkeypatch.setattr(checks, "plans", lambda folder: {name: {"name": name} for name in trained})
    monkeypatch.setattr(checks, "train", lambda device, plan, **more: trained[plan["name"]])
    result = checks.same_bits(machine)
    assert (result.outcome, result.sentence) == ("FAIL", "monitor: 1 differ, first loss of step 0")


def test_a_second_transfer_fails(machine, monkeypatch):
    monkeypatch.setattr(checks, "train", lambda device, plan=None, **more: Trained(transfers=[1, 3, 3] if plan else [0, 1, 1]))
    result = checks.one_transfer(machine)
    assert (result.outcome, result.numbers["counts"]["monitor"]) == ("FAIL", [1, 2, 2])


def test_a_kernel_that_is_wrong_in_one_bit_is_told(monkeypatch):
    right = list(kernels.samples("cpu", True))

    def wrong(device, quick):
        for name, there, host in right:
            there = there.clone()
            if name == "torch.float32[1000]":
                there.view(torch.int32)[500] ^= 1
            yield name, there, host

    assert kernels.disagreements("cpu", True)[0] == []
    monkeypatch.setattr(kernels, "samples", wrong)
    (told,) = [line for line in kernels.disagreements("cpu", True)[0] if "fingerprint" in line]
    assert told.startswith("torch.float32[1000]: the fingerprint is ")


def test_a_training_that_does_not_repeat_itself_is_no_reproach(machine, monkeypatch):
    losses = iter((b"1", b"2"))
    monkeypatch.setattr(checks, "train", lambda device, plan=None, **more: Trained({"loss of step 0": next(losses)}))
    assert checks.repeats(machine).outcome == "not run"
    assert checks.same_bits(machine).outcome == "not run"
