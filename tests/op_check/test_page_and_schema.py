"""What op-check writes: JSON that keeps its published schema, one page that works in a browser, and the answer of a cluster."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import nn

import trainprobe
from tests.monitor.report.chromium import Browser, require_chromium
from trainprobe.cli import main
from trainprobe.op_check.result_schema import schema_text

SCHEMA = Path(__file__).parents[2] / "docs" / "op_check.schema.json"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (F.softmax(y, -1) + F.softmax(y, -1)).max(-1).values.sum()  # the second of two equal calls is not judged again


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, the second with a linear layer that gave an infinity."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    model, x = Small(), torch.randn(4, 8)
    with trainprobe.watch(model, level="L1", task="tensor", step=[0], output=str(folder), console=False) as probe, probe.step():
        model(x).backward()
    ranks = folder / "step0"
    shutil.copytree(ranks / "rank0", ranks / "rank1")
    tensors = load_file(ranks / "rank1" / "tensors.safetensors")
    tensors = {name: t.clone() for name, t in tensors.items()}
    tensors["Functional.linear.0.forward.output"][1, 2] = float("inf")
    save_file(tensors, ranks / "rank1" / "tensors.safetensors")
    return folder


@pytest.fixture(scope="module")
def document(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("json") / "o.json"
    assert main(["op-check", str(dump), "-q", "--json", str(path), "--standard", "by-operator"]) == 2
    return json.loads(path.read_bytes())


def test_the_schema_is_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["op-check", "--schema"]) == 0
    assert capsys.readouterr().out == schema_text()
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), "run `trainprobe op-check --schema > docs/op_check.schema.json`"


def test_the_json_keeps_the_schema_and_other_documents_do_not(document: dict[str, Any], require: Callable[[str], Any]) -> None:
    validator = require("jsonschema").Draft202012Validator(json.loads(schema_text()))
    validator.validate(document)
    assert any(result["got"] == "inf" for result in document["results"])
    for place, value in ((("results", 0, "verdict"), "fine"), (("standard", "results", 0, "status"), "ok"), (("code",), "2")):
        spoiled = json.loads(json.dumps(document))
        target = spoiled
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value
        assert not validator.is_valid(spoiled), place


def test_the_page_shows_the_gravest_result_first_and_finds_by_name(dump: Path, tmp_path: Path) -> None:
    page = tmp_path / "o.html"
    assert main(["op-check", str(dump), "-q", "--html", str(page)]) == 2
    browser = Browser(require_chromium())
    try:
        browser.open(page)
        first = browser.run("document.querySelector('#results tbody tr').innerText")
        assert "Functional.linear.0.forward" in first and "bug" in first and "1 infinities" in first
        assert "is a bug" in browser.run("document.getElementById('sentence').textContent")
        judged = browser.run("document.getElementById('sentence').textContent.match(/calls judged \\((.*)\\)/)[1]")
        chips = browser.run("[...document.querySelectorAll('#chips .chip')].map((e) => e.textContent)")
        outcomes = {" ".join(part.split()[1:]): part.split()[0] for part in judged.split(", ")}
        assert {re.sub(r" \d+ calls?$", "", chip): chip.split()[-2] for chip in chips} == outcomes
        browser.run("document.getElementById('search').value = 'softmax'")
        browser.run("document.getElementById('search').dispatchEvent(new Event('input')) && 0")
        names = browser.run("[...document.querySelectorAll('#results tbody td.name')].map((e) => e.textContent)")
        assert names and all("softmax" in name for name in names)
        assert browser.errors == [] and [url for url in browser.requests if not url.startswith("file:")] == []
        browser.resize(400, 800)
        assert browser.run("document.documentElement.scrollWidth <= 400"), "nothing is wider than a telephone"
    finally:
        browser.close()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_ray_gives_the_answer_of_one_process(dump: Path, document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    arguments = ["--standard", "by-operator", "--replay", str(tmp_path / "out")]
    assert main(["op-check", str(dump), "-q", "--ray", "--json", str(path), *arguments]) == 2
    assert json.loads(path.read_bytes()) == document
    assert (tmp_path / "out" / "Functional_linear_0_forward.py").exists()
