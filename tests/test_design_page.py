"""What docs/design.md says of the tree and of the road of a tensor is true, and no page has a line that has to be scrolled."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.road import LEVELS

# prints the files that hold a finding between the rule that makes it and the page
FOLLOWED = """
import json, pathlib, sys, threading, torch, trainprobe
from trainprobe.engine.core.findings import Finding
from trainprobe.monitor.report_command import report

package, held = trainprobe.__path__[0] + "/", set()

def followed(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        for value in frame.f_locals.values():
            first = value[0] if type(value) in (list, tuple) and value else value
            if isinstance(value, Finding) or isinstance(first, Finding):
                held.add(frame.f_code.co_filename.removeprefix(package))

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
threading.setprofile(followed)
sys.setprofile(followed)
with trainprobe.watch(model, optimizer, output=sys.argv[1], step=[1], monitor=True) as probe:
    for step in range(3):
        with probe.step():
            loss = model(torch.full((1, 2), float("nan") if step else 1.0)).sum()
            loss.backward()
            optimizer.step()
report(pathlib.Path(sys.argv[1]))
sys.setprofile(None)
print(json.dumps(sorted(held)))
"""
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
LONGEST = 128
LONG_LINES = {"docs/migration.md": 3, "README.md": 1}  # that tests compare word for word with what is measured or printed
ELSEWHERE = re.compile(r"docs/(op_check.*|dump_compare|ckpt_.*|mindspore|run_log)\.md")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def printed(*options: str) -> dict[str, dict[str, Any]]:
    """Return what the benchmark measures, by level, in a process in which nothing else was imported."""
    command = [sys.executable, "-m", "benchmarks.road", *options]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600).stdout.splitlines()
    return {road["level"]: road for road in map(json.loads, lines)}


@pytest.fixture(scope="module")
def roads() -> dict[str, dict[str, Any]]:
    return printed()


@pytest.fixture(scope="module")
def device_roads() -> dict[str, dict[str, Any]]:
    if shutil.which("g++") is None:
        pytest.skip("the stand-in accelerator is compiled with g++")
    return printed("--stand-in")


@pytest.fixture(scope="module")
def compiled_roads() -> dict[str, dict[str, Any]]:
    if shutil.which("gcc") is None or shutil.which("gcov") is None:
        pytest.skip("gcc and gcov count what runs in the compiled part")
    return printed("--compiled")


def said(level: str) -> list[int]:
    """Return what the page says of a level: calls, Python files, compiled files of the forward pass and of gradients."""
    row = re.search(rf"\| `{level}` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", PAGE)
    assert row is not None
    return [int(number) for number in row.groups()]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_road_of_a_tensor_is_as_long_as_the_page_says(level, roads):
    measured = roads[level]
    calls, files = said(level)[:2]
    assert abs(measured["calls_a_value"] - calls) < 1 and len(measured["files"]) == files, measured
    assert calls <= 30
    assert all(f"`{name}`" in PAGE for name in measured["files"]), measured


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_road_of_a_tensor_on_a_device_is_as_long_as_the_page_says(level, device_roads):
    measured = device_roads[level]
    row = re.search(rf"\| `{level}` on a device \| (\d+) \| (\d+) \|", PAGE)
    assert row is not None
    calls, files = map(int, row.groups())
    assert abs(measured["calls_a_value"] - calls) < 1 and len(measured["files"]) == files, measured
    assert measured["calls_a_value"] <= 15 and len(measured["files"]) <= 10
    assert all(f"`{name}`" in PAGE for name in measured["files"]), measured


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_road_through_the_compiled_part_is_as_long_as_the_page_says(level, compiled_roads):
    measured = compiled_roads[level]
    files, of_gradients = measured["compiled_files"], measured["compiled_files_of_gradients"]
    assert [len(files), len(of_gradients)] == said(level)[2:], measured
    assert all(f"`{name}`" in PAGE for name in {*files, *of_gradients}), measured
    one_way = {*of_gradients} - ({"ops.c", "op_watch.c"} if level == "mix" else set())  # which gradients of modules do not take
    assert max(len(files), len(one_way)) + said(level)[1] <= 15


def test_a_finding_passes_the_files_that_the_page_names(tmp_path):
    listed = PAGE.partition("A finding goes through eight files")[2].partition("\n`Site`")[0]
    ran = subprocess.run([sys.executable, "-c", FOLLOWED, str(tmp_path / "run")], check=True, capture_output=True, text=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == sorted(re.findall(r"\d\. `(\S+)`", listed))


def test_every_place_that_the_page_names_is_there():
    named = set(re.findall(r"`([a-z_/]+(?:/|\.py|\.c|\.h|\.md))`", PAGE))
    assert len(named) > 40
    folders = (ROOT, ROOT / "trainprobe", ROOT / "trainprobe/engine/arrays/native")
    assert {name for name in named if not any((folder / name).exists() for folder in folders)} == set()


def test_every_room_and_file_of_the_package_is_on_the_page():
    package = ROOT / "trainprobe"
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    rooms |= {f"engine/{path.name}/" for path in (package / "engine").iterdir() if (path / "__init__.py").exists()}
    files = {path.name for path in package.glob("*.py")} | {f"engine/{path.name}" for path in (package / "engine").glob("*.py")}
    files -= {"__init__.py", "__main__.py", "engine/__init__.py"}
    assert {name for name in rooms | files if f"`{name}`" not in PAGE} == set()


def test_no_line_of_a_page_is_longer_than_a_window():
    lines = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8").splitlines() for page in PAGES}
    found = {name: sum(len(line) > LONGEST for line in page) for name, page in lines.items() if not ELSEWHERE.fullmatch(name)}
    assert {name: n for name, n in found.items() if n} == LONG_LINES
