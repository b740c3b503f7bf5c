"""The dump on disk, as other readers see it."""

from __future__ import annotations

import json

import pytest

from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.dumps import layout
from trainprobe.engine.storage.sinks import dump
from trainprobe.errors import OutputError


def write(folder, *collected_steps, **fields):
    sink = dump.open(folder, plan_for(folder, **fields), Place())
    for step_data in collected_steps or (small_step(),):
        sink.write(step_data)
    sink.close()
    return folder / f"step{(collected_steps or (small_step(),))[-1].step}/rank0"


def strictly(path):
    def refuse(token):
        raise AssertionError(f"bare {token} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_the_header_is_what_existing_tools_expect(tmp_path):
    top = strictly(write(tmp_path) / "dump.json")
    assert {key: top[key] for key in ("task", "level", "framework", "dump_data_dir")} == {
        "task": "statistics",
        "level": "mix",
        "framework": "pytorch",
        "dump_data_dir": None,
    }


def test_entries_stand_in_the_order_of_execution(tmp_path):
    assert list(strictly(write(tmp_path) / "dump.json")["data"]) == [
        "Module.layers.0.Block.forward.0",
        "Functional.linear.0.forward",
        "Functional.linear.0.backward",
        "Module.layers.0.Block.parameters_grad.0",
        "Module.layers.0.Block.backward.0",
    ]


def test_entries_have_the_fields_that_existing_tools_read(tmp_path):
    data = strictly(write(tmp_path) / "dump.json")["data"]
    assert [list(entry) for entry in data.values()] == [
        ["input_args", "input_kwargs", "parameters", "output"],
        ["input_args", "input_kwargs", "output"],
        ["input", "output"],
        ["weight"],
        ["input", "output"],
    ]
    assert isinstance(data["Module.layers.0.Block.parameters_grad.0"]["weight"], list)


def test_a_leaf_has_the_fields_that_existing_tools_read(tmp_path):
    leaf = strictly(write(tmp_path) / "dump.json")["data"]["Functional.linear.0.forward"]["input_args"][0]
    assert list(leaf) == ["type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"]


def test_json_is_strict_and_nan_is_a_text_that_float_understands(tmp_path):
    leaf = strictly(write(tmp_path) / "dump.json")["data"]["Functional.linear.0.backward"]["input"][0]
    assert leaf["Max"] == "nan"
    assert float(leaf["Max"]) != float(leaf["Max"])


def test_bare_tokens_are_written_when_asked_for(tmp_path):
    text = (write(tmp_path, nan_tokens=True) / "dump.json").read_text()
    assert '"Max": NaN' in text


def test_the_construct_tree_names_parents_of_the_same_phase(tmp_path):
    assert strictly(write(tmp_path) / "construct.json") == {
        "Module.layers.0.Block.forward.0": None,
        "Functional.linear.0.forward": "Module.layers.0.Block.forward.0",
        "Functional.linear.0.backward": "Module.layers.0.Block.backward.0",
        "Module.layers.0.Block.backward.0": None,
    }


def test_with_micro_batches_the_construct_tree_names_them_too(tmp_path):
    step_data = small_step()
    step_data.calls[1].micro = 1
    tree = strictly(write(tmp_path, step_data) / "construct.json")
    assert tree["Functional.linear.0.forward"] == ["Module.layers.0.Block.forward.0", 1]
    assert tree["megatron_micro_step_number"] == 1


@pytest.mark.parametrize(("level", "construct"), [("L1", True), ("mix", False)])
def test_the_construct_tree_is_empty_without_modules_or_when_it_is_not_wanted(level, construct, tmp_path):
    assert strictly(write(tmp_path, small_step(level=level), construct=construct) / "construct.json") == {}


def test_equal_stacks_are_written_once_with_their_entries(tmp_path):
    step_data = small_step()
    step_data.calls[1].stack = 0
    assert strictly(write(tmp_path, step_data) / "stack.json") == {
        "0": [["Module.layers.0.Block.forward.0", "Functional.linear.0.forward"], step_data.stacks[0]]
    }


def test_the_debug_level_writes_debug_json_alone(tmp_path):
    step_data = small_step(level="debug")
    step_data.calls[0].kind, step_data.calls[0].name, step_data.calls[0].args = (
        "saved",
        "logits",
        {"x": [step_data.values[0], 3]},
    )
    del step_data.calls[1:]
    rank = write(tmp_path, step_data)
    assert [path.name for path in rank.iterdir()] == ["debug.json"]
    saved = strictly(rank / "debug.json")["data"]["logits.0.debug"]
    assert (saved["x"][0]["shape"], saved["x"][1]) == ([2, 3], {"type": "int", "value": 3})


def test_bits_alone_are_written_where_tools_look_for_them(tmp_path):
    import numpy as np

    step_data = small_step(statistics=(), checksums=np.arange(5, dtype=np.uint64) + np.uint64(0xAB))
    leaf = strictly(write(tmp_path, step_data) / "dump.json")["data"]["Functional.linear.0.forward"]["input_args"][0]
    assert (leaf["checksum"], leaf["md5"], leaf["Max"]) == ("0x00000000000000ab", "0x00000000000000ab", None)


def test_a_crc_is_eight_digits_under_md5(tmp_path):
    step_data = small_step(crc32={0: "0012abcd"})
    assert (
        strictly(write(tmp_path, step_data) / "dump.json")["data"]["Functional.linear.0.forward"]["input_args"][0]["md5"]
        == "0012abcd"
    )


def test_extremes_of_a_bool_tensor_are_booleans(tmp_path):
    step_data = small_step()
    step_data.values[0].dtype = "torch.bool"
    step_data.partials[0, 5:7] = 0.0, 1.0
    leaf = strictly(write(tmp_path, step_data) / "dump.json")["data"]["Functional.linear.0.forward"]["input_args"][0]
    assert (leaf["Max"], leaf["Min"]) == (True, False)


def test_a_step_is_hidden_until_it_is_whole(tmp_path):
    from trainprobe.engine.storage.dumps.tensor_files import SavedTensor

    sink = dump.open(tmp_path, plan_for(tmp_path), Place())
    sink.tensor(0, SavedTensor("x", "torch.uint8", (1,), b"\0"))
    assert [path.name for path in (tmp_path / "step0").iterdir()] == [".rank0.partial"]
    sink.write(small_step())
    assert [path.name for path in (tmp_path / "step0").iterdir()] == ["rank0"]


def test_a_step_that_never_ends_leaves_nothing(tmp_path):
    from trainprobe.engine.storage.dumps.tensor_files import SavedTensor

    sink = dump.open(tmp_path, plan_for(tmp_path), Place())
    sink.tensor(0, SavedTensor("x", "torch.uint8", (1,), b"\0"))
    sink.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(OutputError, match="nothing is overwritten"):
        dump.open(tmp_path, plan_for(tmp_path), Place())


def test_a_run_that_continues_adds_steps_and_keeps_the_old_ones(tmp_path):
    write(tmp_path, small_step(0))
    before = (tmp_path / "step0/rank0/dump.json").read_bytes()
    write(tmp_path, small_step(1), on_existing="continue")
    sink = dump.open(tmp_path, plan_for(tmp_path, on_existing="continue"), Place())
    for step in range(3):
        sink.write(small_step(step))
    assert [(finding.rule, finding.step) for finding in sink.warnings_made()] == [("writer", 0)]
    sink.close()
    assert (tmp_path / "step0/rank0/dump.json").read_bytes() == before
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("step*/*")} == {f"step{step}/rank0" for step in range(3)}


def test_a_run_that_replaces_removes_its_ranks_steps_and_no_others(tmp_path):
    write(tmp_path, small_step(0))
    (tmp_path / "step0/rank1").mkdir()
    (tmp_path / "step0/rank1/dump.json").write_text("{}")
    write(tmp_path, small_step(5), on_existing="replace")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("step*/rank*")} == {"step0/rank1", "step5/rank0"}


def test_what_a_killed_run_left_hidden_is_cleared_away(tmp_path):
    (tmp_path / "step3/.rank0.partial").mkdir(parents=True)
    write(tmp_path)
    assert not (tmp_path / "step3").exists()


def test_a_folder_appears_whole_and_is_replaced_only_when_that_is_wanted(tmp_path):
    folder = layout.RankFolder(tmp_path, 7, 3)
    (tmp_path / "step7/.rank3.partial").mkdir(parents=True)  # left over by a run that was killed
    (tmp_path / "step7/.rank3.partial/old.json").write_text("old")
    files = [("dump.json", b"{}"), ("stäck.json", b"x" * 100_000), ("empty.json", b"")]
    folder.complete(files, replace=False)
    assert {p.name: p.read_bytes() for p in (tmp_path / "step7/rank3").iterdir()} == dict(files)
    with pytest.raises(OutputError, match="left as it is"):
        layout.RankFolder(tmp_path, 7, 3).complete([("dump.json", b"new")], replace=False)
    assert (tmp_path / "step7/rank3/dump.json").read_bytes() == b"{}"
    layout.RankFolder(tmp_path, 7, 3).complete([("dump.json", b"new")], replace=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "step7/rank3").iterdir()} == {"dump.json": b"new"}
    assert [p.name for p in (tmp_path / "step7").iterdir()] == ["rank3"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    folder = layout.RankFolder(tmp_path, 1, 0)
    with pytest.raises(OSError, match=r"step1/\.rank0\.partial/no/dump\.json") as fault:
        folder.complete([("no/dump.json", b"{}")], replace=False)
    assert isinstance(fault.value, FileNotFoundError)
    folder.discard()
    assert list(tmp_path.iterdir()) == []


def test_steps_one_after_the_other_are_written_as_each_alone(tmp_path):
    collected_steps = [small_step(step=step) for step in range(3)]
    collected_steps[2].calls[0].name = "layers.1"
    together = tmp_path / "together"
    write(together, *collected_steps)
    for step_data in collected_steps:
        alone = write(tmp_path / f"alone{step_data.step}", step_data)
        for name in ("dump.json", "stack.json", "construct.json"):
            assert (together / f"step{step_data.step}/rank0/{name}").read_bytes() == (alone / name).read_bytes(), name
