"""The first page says what is true: its example prints what it shows, its files exist, and it can be read in a minute."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_shows(tmp_path):
    shown = re.findall(r"^    (trainprobe: .*)$", TEXT, flags=re.M)
    assert len(shown) >= 2 and "error" in shown[0] and "next: " in shown[1]
    command = [sys.executable, "-m", "trainprobe", "run", "--", str(ROOT / "examples" / "new_head.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stderr.splitlines() if line.startswith(("trainprobe: error", "trainprobe:   next"))]
    assert printed[:2] == shown[:2]


def test_the_install_line_and_the_first_command_come_before_sixty_words_are_read():
    before, found, _ = TEXT.partition("    pip install trainprobe\n    trainprobe run -- train.py")
    assert found and len(before.split()) <= 60


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_all_links_of_the_page_lead_somewhere(name):
    page = ROOT / name
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert len(links) >= 8
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert {page for page in pages if f"({page}" not in index} == set()
