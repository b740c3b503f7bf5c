"""A pack on disk is readable at any moment, whoever is killed."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from tests.config_check.launch import environment
from tests.config_check.made_packs import written
from trainprobe.config_check import ConfigChecker
from trainprobe.config_check.merge import merge_ranks
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.config_check.pack_writer import PackWriter
from trainprobe.errors import OutputError

ENDLESS = """
import sys, torch
from trainprobe import ConfigChecker
net = torch.nn.Linear(4, 1)
checker = ConfigChecker(net, output_zip_path=sys.argv[1], micro_steps=10**6, on_error="raise")
while True:
    net(torch.ones(2, 4)).sum().backward()
"""


def rank_file(folder: Path, rank: int, *, complete: bool = True) -> Path:
    writer = PackWriter(folder / "pack.zip", rank, 2)
    writer.put("environment", {"variables": {"RANK": str(rank)}, "others": {}, "withheld": []})
    return writer.close(complete=complete)


def test_the_manifest_holds_version_and_sha256_of_each_member(tmp_path):
    with zipfile.ZipFile(written(tmp_path)) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        assert manifest["version"] == 1
        for name, said in manifest["members"].items():
            assert hashlib.sha256(archive.read(name)).hexdigest() == said["sha256"]
        assert set(manifest["members"]) == set(archive.namelist()) - {"manifest.json"}


@pytest.mark.slow
def test_a_killed_run_leaves_a_readable_pack(tmp_path):
    path = tmp_path / "pack.zip"
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], env=environment(), cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (path.exists() and read_pack(path).micro_steps > 1) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    pack = read_pack(path)
    assert not pack.complete
    assert pack.micro_steps > 1
    assert pack.has("weights") and pack.has("dataset") and pack.has("randomness") and pack.has("environment")


def test_a_pack_counts_the_micro_steps_that_it_holds_and_not_those_that_wait(tmp_path):
    writer = PackWriter(tmp_path / "pack.zip")
    slow, go_on = threading.Event(), threading.Event()

    def packages() -> dict[str, str]:
        slow.set()
        go_on.wait(30)
        return {}

    writer.put("packages", packages)
    assert slow.wait(30)
    writer.put("weights", {"parameters": {}}, 0)
    go_on.set()
    deadline = time.monotonic() + 30
    while not writer.path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    first = read_pack(writer.path)
    assert (first.micro_steps, first.has("weights")) == (0, False)
    assert read_pack(writer.close()).micro_steps == 1


def test_numbers_without_a_word_in_json_become_texts(tmp_path):
    path = written(tmp_path, weights={"parameters": {"a": {"min": float("nan"), "max": float("inf"), "norm": float("-inf")}}})
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("rank0/weights.json"))["parameters"]["a"] == {"min": "nan", "max": "inf", "norm": "-inf"}


def test_the_packs_of_ranks_are_merged_into_one_and_removed(tmp_path):
    for rank in (0, 1):
        rank_file(tmp_path, rank)
    assert merge_ranks(tmp_path / "pack.zip") == []
    assert [p.name for p in tmp_path.iterdir()] == ["pack.zip"]
    pack = read_pack(tmp_path / "pack.zip")
    assert [pack.ranks[r].single["environment"]["variables"]["RANK"] for r in (0, 1)] == ["0", "1"]
    assert pack.complete


def test_a_merge_that_lacks_a_rank_says_so_and_keeps_the_packs(tmp_path):
    rank_file(tmp_path, 1)
    assert merge_ranks(tmp_path / "pack.zip") == [0]
    assert (tmp_path / "pack.rank1.zip").exists()
    pack = read_pack(tmp_path / "pack.zip")
    assert not pack.complete
    assert pack.missing_ranks() == [0]


def test_packs_of_ranks_that_were_never_merged_are_read_as_one(tmp_path):
    rank_file(tmp_path, 0)
    rank_file(tmp_path, 1, complete=False)
    pack = read_pack(tmp_path / "pack.zip")
    assert sorted(pack.ranks) == [0, 1]
    assert not pack.complete


def test_a_pack_of_an_earlier_run_is_not_merged(tmp_path):
    rank_file(tmp_path, 0)
    time.sleep(0.05)
    begun = time.time()
    time.sleep(0.05)  # the clock of files lags behind by some milliseconds
    rank_file(tmp_path, 1)
    assert merge_ranks(tmp_path / "pack.zip", 2, since=begun) == [0]


def test_a_file_that_is_no_pack_is_not_replaced(tmp_path):
    precious = tmp_path / "data.zip"
    with zipfile.ZipFile(precious, "w") as archive:
        archive.writestr("thesis.txt", "all of it")
    before = precious.read_bytes()
    with pytest.raises(OutputError, match="is not a pack; it is not replaced"):
        ConfigChecker(output_zip_path=precious)
    assert precious.read_bytes() == before


def test_a_folder_in_place_of_the_pack_is_an_error(tmp_path):
    with pytest.raises(OutputError, match="is a folder"):
        ConfigChecker(output_zip_path=tmp_path)


def test_an_earlier_pack_is_replaced(tmp_path):
    path = written(tmp_path)
    ConfigChecker(output_zip_path=path)
    assert read_pack(path).has("packages")
