"""The first hour is walked from the wheel in an empty environment: the commands of docs/quickstart.md give the four answers."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

pytest.importorskip("elftools", reason="run by `make test-wheels`, in an environment of its own")

ROOT = Path(__file__).parents[2]
HOUR = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").partition("## The first hour\n")[2].partition("\n## ")[0]

# question → the exit code of its last command, and what else it says beside the answer that the page shows
ANSWERS = {
    "Is it healthy?": (0, "error ownership (step 0, rank 0)"),
    "Where did the NaN come from?": (1, "the first NaN is of step 3, on rank 0: Torch.sqrt.0.forward, output, in scale"),
    "What differs?": (2, "approximate is 'none' in A and 'tanh' in B"),
    "Is my conversion right?": (2, "layers.0.attention.k.weight of B holds layers.0.attention.v.weight of A"),
}


def commands() -> dict[str, list[str]]:
    """Return the commands of each question, as the page gives them."""
    parts = re.split(r"^\*(.+\?)\*", HOUR.partition("\n|")[0], flags=re.M)[1:]
    return {
        question: [line.strip() for line in text.splitlines() if line.startswith("    ")]
        for question, text in zip(parts[::2], parts[1::2], strict=True)
    }


def rows() -> dict[str, tuple[int, str]]:
    """Return what the table says of each question: how many commands it takes, and the answer."""
    found = re.findall(r"^\| (.+\?) \| (\d+) \| [\d.]+ \| `(.+)` \|$", HOUR, flags=re.M)
    return {question: (int(count), answer) for question, count, answer in found}


def test_the_table_counts_the_commands_of_each_question():
    assert {question: len(lines) for question, lines in commands().items()} == {q: n for q, (n, _) in rows().items()}
    assert set(rows()) == set(ANSWERS)


@pytest.mark.parametrize("compiler", [True, False], ids=["with a compiler", "without a compiler"])
def test_the_hour_is_walked_from_the_wheel(compiler, wheel, fresh, tmp_path, capsys):
    environment = fresh(wheel)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    more = os.environ["PATH"] if compiler else ""
    assert (environment.shell("command -v cc", tmp_path, more).returncode == 0) == (compiler and shutil.which("cc") is not None)
    began, table = time.monotonic(), []
    for question, lines in commands().items():
        start = time.monotonic()
        for line in lines:
            done = environment.shell(line, tmp_path, more)
            code = ANSWERS[question][0] if line == lines[-1] else 0
            assert done.returncode == code, f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        said = done.stdout + done.stderr
        for words in (ANSWERS[question][1], rows()[question][1]):
            assert words in said, said
        table.append(f"{question} | {len(lines)} commands | {time.monotonic() - start:.1f} s")
    where = environment.run("python", "-c", "import trainprobe; print(trainprobe.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(environment.packages))
    with capsys.disabled():
        print("", *table, f"all of it | {time.monotonic() - began:.1f} s", sep="\n")
