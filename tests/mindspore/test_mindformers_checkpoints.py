"""Checkpoints that MindFormers writes here and now, of one rank and of tensor, pipeline and expert parallelism."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ckpt_compare.writers.write_mindformers import LAYOUTS, read, trained, write
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.cli import main


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mindformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)  # MindFormers writes its log where it is imported
        for layout in LAYOUTS:
            write(root / layout, layout)
    return {layout: root / layout for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_weight_is_what_mindformers_itself_loads(folders: dict[str, Path], layout: str) -> None:
    weights, states = trained()
    theirs = read(folders[layout])
    assert all(np.array_equal(theirs[name], array) for name, array in weights.items())
    found = open_checkpoint(folders[layout])
    assert found.problems == ()
    assert len(found.tensors) == len(weights) + len(states)
    for tensor in found.tensors.values():
        whole: Any = np.full(tensor.shape, np.nan, np.float32)
        for piece in tensor.pieces:
            whole[piece.rectangle.within((0,) * whole.ndim)] = piece.source.load().view(np.float32)
        assert np.array_equal(whole, (theirs | states)[tensor.native]), tensor.native


@pytest.mark.parametrize(("a", "b"), [*itertools.combinations(LAYOUTS, 2)])
def test_one_state_is_identical_in_every_pair_of_layouts(folders: dict[str, Path], a: str, b: str, capsys: Any) -> None:
    assert main(["ckpt-compare", str(folders[a]), str(folders[b])]) == 0
    assert capsys.readouterr().out.startswith("identical")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_element_is_found_and_named(folders: dict[str, Path], layout: str, tmp_path: Path, capsys: Any) -> None:
    for name in ("layers.1.experts.weight1", "adam_v.layers.0.attention.proj.weight", "head.weight"):
        write(tmp_path / name, layout, change=name)
        capsys.readouterr()  # MindFormers speaks as it writes
        assert main(["ckpt-compare", str(folders["tensor"]), str(tmp_path / name)]) == 2
        assert name.removeprefix("adam_v.") in capsys.readouterr().out.splitlines()[0]
