"""Runs behind a URL: what the commands say of them is what they say of the same files in a folder."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from benchmarks.fleet import Fleet, planted_in, write_fleet
from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.cli import main
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.dumps.layout import LIVE_FILE
from trainprobe.engine.storage.sinks import jsonl, parquet
from trainprobe.monitor import remote_run


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("there") / "run"
    shape = Fleet(data=4, tensor=1, pipeline=1, steps=8, parameters=3, activations=4)
    write_fleet(replace(shape, planted=planted_in(shape)), folder)
    (folder / "rank0" / "findings.jsonl").write_text("")
    (folder / "step3" / "rank0").mkdir(parents=True)
    (folder / "step3" / "rank0" / "dump_tensor_data.safetensors").write_bytes(b"x" * 1000)
    return folder


@pytest.fixture(params=["memory", "file", "simplecache"])
def url(request, here):
    if request.param == "memory":
        fsspec.filesystem("memory").put(str(here), "/bucket/run", recursive=True)
        return "memory://bucket/run"
    return f"{'simplecache::' if request.param == 'simplecache' else ''}file://{here}"


def said(capsys, *command):
    code = main([*command])
    shown = capsys.readouterr()
    assert shown.err == ""
    return code, shown.out


def test_each_command_says_of_a_url_what_it_says_of_the_folder(url, here, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (["judge", "--json"], ["top", "--once"]):
        folder, remote = (said(capsys, *command, str(where)) for where in (here, url))
        assert remote[0] == folder[0]
        if command[0] == "judge":
            assert remote[1] == folder[1].replace(str(here), url)
        else:  # the head is wrapped where the name is long
            shown = [" ".join(text[1].split()).split("ranks", 1)[1] for text in (remote, folder)]
            assert shown[0] == shown[1]
    assert said(capsys, "report", url)[0] == 0
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert not (here / "report.html").exists()
    code, runs = said(capsys, "runs", url)
    assert code == 0
    assert "8 (0 to 7)" in runs
    copy = remote_run.run_folder(url)
    assert (copy / "rank1" / "metrics-000000.parquet").is_file()
    assert not list(copy.rglob("*.safetensors"))


def test_all_ranks_behind_a_url_are_looked_at_as_in_the_folder(url, here, capsys, tmp_path):
    pytest.importorskip("duckdb", reason="requirements/oldest.txt is without DuckDB")
    folder, remote = (said(capsys, "judge", "--fleet", "--json", str(where)) for where in (here, url))
    assert remote == (folder[0], folder[1].replace(str(here), url))
    pages = [tmp_path / name for name in ("folder.html", "remote.html")]
    shown = [
        said(capsys, "report", "--fleet", str(where), "-o", str(page)) for where, page in zip((here, url), pages, strict=True)
    ]
    assert shown[0][0] == shown[1][0]
    assert pages[1].read_text(encoding="utf-8") == pages[0].read_text(encoding="utf-8").replace(str(here), url)
    assert main(["judge", "--fleet", "--ray", url]) == 3
    assert "all machines see" in capsys.readouterr().err


def test_one_log_behind_a_url_is_read(tmp_path, capsys):
    sink = jsonl.open(tmp_path, plan_for(tmp_path), Place())
    sink.write(small_step())
    sink.close()
    log = tmp_path / "rank0" / "records.jsonl"
    code, told = said(capsys, "judge", "--json", str(log))
    assert said(capsys, "judge", "--json", f"file://{log}") == (code, told.replace(str(log), f"file://{log}"))


def test_a_copy_follows_the_run(tmp_path):
    sink = parquet.open(tmp_path, plan_for(tmp_path, sinks=("parquet",)), Place())
    sink.write(small_step(0))
    sink.flush()
    copy = remote_run.run_folder(f"file://{tmp_path}")
    assert (copy / "rank0" / LIVE_FILE).read_bytes() == (tmp_path / "rank0" / LIVE_FILE).read_bytes()
    sink.write(small_step(1))
    sink.close()
    remote_run.refresh(copy)
    assert [path.name for path in (copy / "rank0").iterdir()] == ["metrics-000000.parquet"]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("memory://nowhere/run", "memory://nowhere/run"),
        ("nosuch://a/b", "nosuch://a/b cannot be read"),
        ("s3://bucket/run", "pip install s3fs"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(url, told, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert main(["judge", url]) == 3
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_a_name_that_leads_out_of_the_folder_is_refused(capsys):
    system = fsspec.filesystem("memory")
    path = "/bucket/evil/../../records.jsonl"
    system.store[path] = MemoryFile(system, path, b"{}")
    assert main(["judge", "memory://bucket/evil"]) == 3
    assert "out of its folder" in capsys.readouterr().err


def test_without_fsspec_a_sentence_names_what_to_install(tmp_path):
    program = "import sys; sys.modules['fsspec'] = None; from trainprobe.cli import main; sys.exit(main(sys.argv[1:]))"
    run = [sys.executable, "-c", program, "judge", "s3://bucket/run"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 3
    assert "pip install 'trainprobe[remote]'" in done.stderr


def test_compacting_a_url_is_refused(url, capsys):
    assert main(["runs", "--compact", url]) == 3
    assert "run it where the files are" in capsys.readouterr().err
