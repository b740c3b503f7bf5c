"""Each notebook runs from its first cell to its last, and shows the right answer as HTML; none of them stores an output."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"

# notebook → what its cells show, in order: the words that matter of each
SHOWN = {
    "is_it_healthy": [
        ["200 steps watched, no findings"],
        [
            "200 steps watched, 3 findings (ownership",
            "the optimizer owns 4 of 6 live trainable parameters: it never updates 4.weight",
        ],
    ],
    "where_did_the_nan_come_from": [
        ["the first NaN of step 3 is in loss", "repeat step 3 with `record: mix, step: [3], output: again`"],
        ["the first NaN of step 3 is in op Torch.sqrt, output", ":15: root = torch.sqrt(self.gain)"],
        ["Torch.sqrt.0.forward, output, in scale:", "line 15, in Scale.forward, root = torch.sqrt(self.gain)"],
    ],
    "what_differs": [
        ["the first difference is at Functional.gelu.0.forward (step 0", "approximate is 'none' in A and 'tanh' in B"],
        ["calls agree in all that the dumps hold of them"],
    ],
    "is_my_conversion_right": [
        ["differ: k and v are exchanged in 2 layers"],
        ["identical: 9 weights tensors"],
    ],
}

# runs the cells as a kernel does: one namespace, sources in linecache; what a cell prints and its last expression are shown
KERNEL = """
import ast, contextlib, io, json, linecache, os, sys

shown, names = [], {"__name__": "__main__"}
for number, text in enumerate(json.load(sys.stdin)):
    name = f"/tmp/ipykernel_{os.getpid()}/{number}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    tree = ast.parse(text, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), names)
    shown += filter(None, [printed.getvalue(), None if value is None else value._repr_html_()])
json.dump(shown, sys.stdout)
"""


def cells(name: str) -> list[dict[str, object]]:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def test_every_notebook_is_run():
    assert {path.stem for path in NOTEBOOKS.iterdir()} == {*SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_shows_the_right_answer(name, tmp_path):
    code = ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(code),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    texts = [html.unescape(re.sub(r"<[^>]+>", " ", one)) for one in shown]
    assert [one.startswith('<div style="border-left') for one in shown].count(False) == (name == "where_did_the_nan_come_from")
    assert len(texts) == len(SHOWN[name]), texts
    for text, words in zip(texts, SHOWN[name], strict=True):
        assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_stores_no_output_and_its_links_lead_somewhere(name):
    assert [cell["id"] for cell in cells(name) if cell.get("outputs") or cell.get("execution_count")] == []
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 8 << 10
    links = re.findall(r"\]\(([^)]+)\)", "".join("".join(cell["source"]) for cell in cells(name)))
    assert links
    assert [link for link in links if not (NOTEBOOKS / link).exists()] == []


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_is_found_from_the_quick_start(name):
    assert f"](../examples/notebooks/{name}.ipynb)" in (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
