"""Files that MindFormers 1.9 wrote (see writers/write_mindformers.py), read without it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.ckpt_compare.verdicts import judged
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise
from trainprobe.errors import FormatError

DATA = Path(__file__).parent / "data" / "mindformers"
PARALLEL = ("pipeline", "expert")
STEP = "iteration_00000003"


def joined(path: Path) -> dict[str, np.ndarray]:
    """Return each tensor by its native name, put together from its pieces."""
    found = {}
    for tensor in open_checkpoint(path).tensors.values():
        whole = np.full(tensor.shape, np.nan, np.float32)
        for piece in tensor.pieces:
            whole[piece.rectangle.within((0,) * whole.ndim)] = piece.source.load().view(np.float32)
        found[tensor.native] = whole
    return found


def copied(tmp_path: Path, layout: str) -> Path:
    return Path(shutil.copytree(DATA / layout, tmp_path / layout))


@pytest.mark.parametrize("layout", ("one", *PARALLEL))
def test_every_tensor_is_the_whole_one_of_the_training(layout):
    whole = np.load(DATA / "whole.npz")
    assert recognise(DATA / layout) == "mindformers"
    found = joined(DATA / layout)
    assert sorted(found) == sorted(whole)
    assert all(np.array_equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("layout", PARALLEL)
def test_one_rank_and_several_are_identical(layout):
    assert judged(DATA / "one", DATA / layout).sentence.startswith("identical")
    assert judged(DATA / "one" / STEP, DATA / layout / STEP).code == 0


def test_counters_of_the_training_are_state():
    found = open_checkpoint(DATA / "pipeline").state
    assert found["optimizer"] == {"step": 3}
    assert found["iteration"]["epoch_num"] == 1


@pytest.mark.parametrize("layout", PARALLEL)
def test_another_element_in_one_part_is_named(tmp_path, layout):
    folder = copied(tmp_path, layout)
    file = folder / STEP / "tiny-model-0000003-0000004.safetensors"
    raw = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(raw[:8], "little")
    raw[begin + json.loads(raw[8:begin])["layers.1.experts.weight2"]["data_offsets"][1] - 1] ^= 0x40
    file.write_bytes(raw)
    answer = judged(DATA / "one", folder)
    assert answer.code == 2
    assert "experts" in answer.sentence
    assert "[3, 7, 3]" in " ".join([answer.sentence, *answer.details])


def test_another_element_in_one_copy_of_a_part_is_named(tmp_path):
    folder = copied(tmp_path, "expert")
    file = folder / STEP / "tiny-model-0000003-0000004.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 0x40
    file.write_bytes(raw)
    answer = judged(DATA / "one", folder)
    assert (answer.code, answer.sentence) == (2, "differ: 1 tensor whose copies inside one checkpoint disagree")
    assert "layers.1.norm.weight" in answer.details[0]


def test_a_file_that_is_missing_is_named_and_no_pass(tmp_path):
    folder = copied(tmp_path, "pipeline")
    (folder / STEP / "tiny-model-0000002-0000004.safetensors").unlink()
    assert any("tiny-model-0000002" in problem.where for problem in open_checkpoint(folder).problems)
    assert judged(DATA / "one", folder).code not in (0, 1)


def test_metadata_that_does_not_fit_the_files_is_said_and_no_pass(tmp_path):
    folder = copied(tmp_path, "expert")
    file = folder / STEP / "metadata.json"
    told = json.loads(file.read_text())
    told["state_dict_metadata"]["head.weight"]["axis_fragmentations"] = [2, 1]
    file.write_text(json.dumps(told))
    assert any("head.weight" in problem.message for problem in open_checkpoint(folder).problems)
    assert judged(DATA / "one", folder).code not in (0, 1)
    told["state_dict_metadata"]["head.weight"]["layout"]["interleaved_parallel"] = True
    file.write_text(json.dumps(told))
    with pytest.raises(FormatError, match="interleaved"):
        open_checkpoint(folder)
