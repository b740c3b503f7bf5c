"""Dumps of any dialect, and files that lie."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainprobe.engine.core.records import Call, Opaque
from trainprobe.engine.storage.dumps import TensorStore, read, read_step
from trainprobe.engine.storage.dumps.layout import find_dumps
from trainprobe.errors import FormatError, UnsafeFile

FLOAT = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 2.0, "Min": 1.0, "Mean": 1.5, "Norm": 2.25}


def dump(folder: Path, data, **files) -> Path:
    rank = folder / "step3" / "rank1"
    rank.mkdir(parents=True)
    top = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None, "data": data}
    (rank / "dump.json").write_text(json.dumps(top))
    for name, content in files.items():
        (rank / f"{name}.json").write_text(json.dumps(content))
    return rank


def forward(**more):
    return {"input_args": [FLOAT], "input_kwargs": {}, "output": [FLOAT], **more}


def test_step_and_rank_come_from_the_names_of_the_folders(tmp_path):
    step_data = read(dump(tmp_path, {"Torch.add.0.forward": forward()}))
    assert (step_data.step, step_data.place.rank) == (3, 1)


def test_the_old_stack_file_names_each_entry_itself(tmp_path):
    frames = ["File a.py, line 1", "File b.py, line 2"]
    step_data = read(dump(tmp_path, {"Torch.add.0.forward": forward()}, stack={"Torch.add.0.forward": frames}))
    assert step_data.stacks[step_data.calls[0].stack] == frames


def test_gradients_of_parameters_without_a_number_are_the_first(tmp_path):
    step_data = read(dump(tmp_path, {"Module.fc.Linear.parameters_grad": {"weight": [FLOAT]}}))
    record = next(step_data.records())
    assert (record.site.name, record.site.slot, record.site.call) == ("fc.weight", "grad", 0)


def test_a_cumulative_number_of_gradients_is_kept(tmp_path):
    step_data = read(dump(tmp_path, {"Module.fc.Linear.parameters_grad.41": {"weight": [FLOAT]}}))
    assert step_data.calls[0].call == 41


def test_a_recomputed_entry_of_an_older_file_is_marked(tmp_path):
    step_data = read(dump(tmp_path, {"Module.fc.Linear.forward.1": forward(is_recompute=True)}))
    assert step_data.calls[0].phase == "recompute"


def test_a_mindspore_dump_is_read(tmp_path):
    leaf = {
        "type": "mindspore.Tensor",
        "dtype": "Float32",
        "shape": [4],
        "Max": 1,
        "Min": 0,
        "Mean": 0.5,
        "Norm": 1.0,
        "layout": "x",
    }
    step_data = read(dump(tmp_path, {"Cell.net.Dense.forward.0": {"input_args": [leaf], "input_kwargs": {}, "output": [leaf]}}))
    assert (step_data.calls[0].kind, step_data.calls[0].name, step_data.values[0].dtype) == ("module", "net", "Float32")
    assert step_data.values[0].extra == {"layout": "x"}


def test_a_number_that_is_null_is_absent_and_one_that_is_nan_is_nan(tmp_path):
    rank = dump(tmp_path, {"Torch.add.0.forward": forward(output=[{**FLOAT, "Max": float("nan"), "Mean": None}])})
    values = [dict(record.values) for record in read(rank).records()][1]
    assert np.isnan(values.pop("max"))
    assert values == {"min": 1.0, "norm": 2.25}


def test_the_parent_may_stand_beside_its_micro_batch(tmp_path):
    data = {"Module.a.A.forward.0": forward(), "Torch.add.0.forward": forward()}
    tree = {
        "Module.a.A.forward.0": [None, 1],
        "Torch.add.0.forward": ["Module.a.A.forward.0", 1],
        "megatron_micro_step_number": 1,
    }
    calls = read(dump(tmp_path, data, construct=tree)).calls
    assert calls[1].parent is calls[0]
    assert [call.micro for call in calls] == [1, 1]


def test_leaves_that_are_no_tensors_are_what_they_were(tmp_path):
    args = [
        {"type": "int", "value": 3},
        {"type": "slice", "value": [0, None, 1]},
        {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "abc"},
        {"nested": [{"type": "str", "value": "mean"}, None]},
    ]
    call: Call = read(dump(tmp_path, {"Torch.add.0.forward": forward(input_args=args)})).calls[0]
    assert call.args == [
        3,
        Opaque("slice", [0, None, 1]),
        Opaque("torch.ProcessGroup", None, {"group_ranks": [0, 1], "group_id": "abc"}),
        {"nested": ["mean", None]},
    ]


def test_an_entry_of_no_known_form_is_told(tmp_path):
    step_data = read(dump(tmp_path, {"surprise": forward(), "Torch.add.0.forward": forward()}))
    assert (len(step_data.calls), "surprise" in step_data.notes[0]) == (1, True)


def test_all_ranks_of_a_step_are_read_at_once(tmp_path):
    dump(tmp_path, {"Torch.add.0.forward": forward()}).rename(tmp_path / "step3/rank5")
    dump(tmp_path, {})
    found = {rank: (step_data.place.rank, len(step_data.calls)) for rank, step_data in read_step(tmp_path / "step3").items()}
    assert found == {1: (1, 0), 5: (5, 1)}


# ---- files that lie ------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "dump.json").write_text('{"data": {')
    with pytest.raises(FormatError, match=r"dump\.json is not JSON"):
        read(tmp_path)


def test_a_folder_without_a_dump_is_named(tmp_path):
    with pytest.raises(FormatError, match="no dump at"):
        read(tmp_path)


@pytest.mark.parametrize("data", [[], None, "text", 3])
def test_data_that_is_no_object_is_refused(data, tmp_path):
    with pytest.raises(FormatError, match="no object `data`"):
        read(dump(tmp_path, data))


@pytest.mark.parametrize(
    "leaf",
    [
        {**FLOAT, "Max": "many"},
        {**FLOAT, "Max": [1]},
        {**FLOAT, "shape": ["two"]},
        {**FLOAT, "md5": "no hexadecimal"},
        {"type": "int", "value": "three"},
        {"type": "int", "value": None},
    ],
)
def test_a_leaf_that_cannot_be_read_names_the_file_and_the_entry(leaf, tmp_path):
    with pytest.raises(FormatError, match=r"dump\.json: entry 'Torch\.add\.0\.forward'"):
        read(dump(tmp_path, {"Torch.add.0.forward": forward(input_args=[leaf])}))


def test_a_nest_deeper_than_400_is_refused(tmp_path):
    deep = FLOAT
    for _ in range(401):
        deep = [deep]
    with pytest.raises(FormatError, match=r"nested"):
        read(dump(tmp_path, {"Torch.add.0.forward": forward(input_args=deep)}))


def test_a_bottomless_nest_is_refused(tmp_path):
    (tmp_path / "dump.json").write_text("[" * 200_000)
    with pytest.raises(FormatError, match=r"dump\.json"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["../secret.npy", "/etc/passwd", "..\\secret.npy", ".hidden.npy", "a/b.npy"])
def test_a_tensor_name_that_leads_out_of_the_folder_is_refused(name, tmp_path):
    np.save(tmp_path / "secret.npy", np.ones(2))
    (tmp_path / "dump_tensor_data").mkdir()
    with pytest.raises(UnsafeFile, match="leads out"):
        TensorStore(tmp_path).array(name)


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path):
    np.save(tmp_path / "secret.npy", np.ones(2))
    (tmp_path / "dump_tensor_data").mkdir()
    (tmp_path / "dump_tensor_data" / "a.npy").symlink_to(tmp_path / "secret.npy")
    with pytest.raises(UnsafeFile, match="leads out"):
        TensorStore(tmp_path).array("a.npy")


def test_a_pickle_in_an_npy_file_is_not_loaded(tmp_path):
    (tmp_path / "dump_tensor_data").mkdir()
    np.save(tmp_path / "dump_tensor_data" / "a.npy", np.array([print], object), allow_pickle=True)
    with pytest.raises(FormatError, match="cannot be read"):
        TensorStore(tmp_path).array("a.npy")


class Runs:
    def __reduce__(self):
        return (Path("/nowhere").exists, ())


def test_code_in_a_pt_file_is_not_run(tmp_path):
    import torch

    (tmp_path / "dump_tensor_data").mkdir()
    torch.save(Runs(), tmp_path / "dump_tensor_data" / "a.pt")
    with pytest.raises(UnsafeFile, match="holds more than a tensor"):
        TensorStore(tmp_path).array("a.pt")


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 999]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 16]}},
        {"a": 3},
        [],
    ],
)
def test_a_safetensors_header_that_contradicts_the_file_is_refused(header, tmp_path):
    text = json.dumps(header).encode()
    (tmp_path / "tensors.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(FormatError, match="header"):
        TensorStore(tmp_path)


def test_a_folder_that_is_named_for_a_process_is_rank_0_however_it_is_named(tmp_path):
    folder = tmp_path / "step7/proc32418"
    folder.mkdir(parents=True)
    (folder / "dump.json").write_text("{}")
    for named in (tmp_path, folder.parent, folder, folder / "dump.json"):
        assert find_dumps(named) == {7: {0: folder}}, named
    assert find_dumps(tmp_path / "nothing") == {}
