"""Modules of other names are paired by structure across PyTorch and MindSpore too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.mindspore import glm_mindspore
from tests.mindspore.test_across_frameworks import PLANS, of_torch, plan
from trainprobe.cli import main

__all__ = ["of_torch"]  # the fixture
OTHERS = {"layers.": "h.", "dense_h_to_4h": "widen", "dense_4h_to_h": "narrow", "attention": "attn", "embedding": "words"}


def renamed(dump: Path, folder: Path) -> Path:
    """A copy of a dump in which modules have other names."""
    copy = shutil.copytree(dump, folder / "renamed")

    def other(name: str | None) -> str | None:
        for old, new in OTHERS.items() if name else ():
            name = name.replace(f"Module.{old}", f"Module.{new}").replace(f".{old}", f".{new}")
        return name

    for path in [*copy.rglob("dump.json"), *copy.rglob("construct.json")]:
        top = json.loads(path.read_text())
        if path.name == "dump.json":
            top["data"] = {other(name): entry for name, entry in top["data"].items()}
        else:
            top = {other(name): [other(at[0]), *at[1:]] if isinstance(at, list) else other(at) for name, at in top.items()}
        path.write_text(json.dumps(top))
    return copy


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("planted", [None, "layers.1.mlp.dense_h_to_4h.weight"])
def test_modules_of_other_names_are_paired(
    level: str,
    planted: str | None,
    of_torch: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a = renamed(of_torch / level, tmp_path)
    glm_mindspore.main(plan(tmp_path, "b", **PLANS[level]), **({"planted": planted} if planted else {}))
    capsys.readouterr()
    result = tmp_path / "result.json"
    code = main(["dump-compare", str(a), str(tmp_path / "b"), "--json", str(result)])
    said = capsys.readouterr().out
    assert "have other names in B and were paired by structure" in said, said
    calls = json.loads(result.read_text())["calls"]
    assert {call["paired_by"] for call in calls} >= {"equal weights", "what it calls"}
    if planted:
        assert code == 2
        assert "h.1.mlp.widen" in said.splitlines()[0] and "layers.1.mlp.dense_h_to_4h" in said.splitlines()[0], said
    else:
        assert code == 1, said
