"""The support table of docs/frameworks.md says what tests prove, of the versions that are pinned, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import support_table
from tests.proofs import PACKAGES
from tests.support_table import BEGIN, END, PAGE, ROOT, declared, table, told


def pins() -> dict[str, str]:
    """Return package → pinned version; of a package that both environments hold, the one beside PyTorch."""
    found: dict[str, str] = {}
    for name in ("mindspore", "frameworks", "core", "torch"):
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            package, pinned, version = line.partition("==")
            found |= {package: version.split()[0]} if pinned and not line.startswith("#") else {}
    return found


def test_every_word_of_the_table_is_declared_by_a_test():
    said, _ = told(PAGE.read_text(encoding="utf-8"))
    assert len(said) > 10
    assert sorted(said - declared()) == []


def test_the_table_names_the_versions_that_are_pinned():
    _, versions = told(PAGE.read_text(encoding="utf-8"))
    known = pins()
    assert versions == {name: " ".join(known[package] for package in PACKAGES[name]) for name in versions}


def test_markers_name_known_frameworks_and_texts_that_a_cell_can_hold():
    for framework, what, _ in declared():
        assert framework in PACKAGES
        assert what and not set(";,|:") & set(what), what


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Return what writes what a run has left, beside a page with a table."""
    page = tmp_path / "frameworks.md"
    page.write_text(f"before\n{BEGIN}\n{table(set(), {})}\n{END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(support_table, "FOLDER", tmp_path)
    monkeypatch.setattr(support_table, "PAGE", page)

    def leave(*outcome: list, version: str = "2.6.6") -> None:
        (tmp_path / "torch.json").write_text(json.dumps({"versions": {"Lightning": version}, "outcome": outcome}))

    return leave


DDP, ALONE = ["Lightning", "DDP", 2], ["Lightning", "manual optimization", 1]


def test_what_was_proved_is_written_and_read_back(left):
    left([*DDP, True], [*ALONE, True], ["Lightning", "FSDP", 2, False])
    support_table.main(check=False)
    text = support_table.PAGE.read_text(encoding="utf-8")
    assert told(text) == ({tuple(DDP), tuple(ALONE)}, {"Lightning": "2.6.6"})
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "  - 1 rank: manual optimization\n  - 2 ranks: DDP\n" in text
    assert max(map(len, text.splitlines())) <= 128


def test_what_no_test_proved_and_another_version_fail_the_check(left, capsys):
    left([*DDP, True], [*ALONE, True])
    support_table.main(check=False)
    assert support_table.main(check=True) == 0
    left([*DDP, False], [*ALONE, True])
    assert support_table.main(check=True) == 1
    left([*DDP, True], [*ALONE, True], version="2.7.0")
    assert support_table.main(check=True) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "no test of this run proved: Lightning DDP 2",
        "Lightning: the table says 2.6.6, what ran was 2.7.0",
    ]


MARKED = """
import pytest

@pytest.mark.proves("PyTorch", {"a": "A", "b": "B"}, ranks=2)
@pytest.mark.parametrize("kind", ["a", "b"])
def test_kinds(kind):
    assert kind == "a"

@pytest.mark.proves("PyTorch", "A", ranks=(2, 4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(ranks):
    pass

@pytest.mark.proves("PyTorch", "skipped")
def test_skipped():
    pytest.skip("not here")
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_what_passes_is_collected_from_pytest_itself_with_workers_and_without(tmp_path, workers):
    collecting = (ROOT / "tests" / "proofs.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(collecting.replace('parents[1] / ".proofs"', 'parent / "left"'), encoding="utf-8")
    (tmp_path / "test_marked.py").write_text(MARKED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *workers]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "1 failed, 3 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    (file,) = (tmp_path / "left").iterdir()
    outcome = json.loads(file.read_text())["outcome"]
    assert outcome == [["PyTorch", "A", 2, True], ["PyTorch", "A", 4, True], ["PyTorch", "B", 2, False]]
