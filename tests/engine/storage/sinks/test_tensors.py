"""Tensor values on disk, against the libraries that read them."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.dumps import TensorStore, read
from trainprobe.engine.storage.dumps.tensor_files import SafetensorsFile, SavedTensor, file_name
from trainprobe.engine.storage.sinks import dump

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


def some(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(-6, 9).reshape(3, 5) * 1.5).to(dtype)


def store(folder, tensors, **room):
    file = SafetensorsFile(folder / "tensors.safetensors", **room)
    for key, tensor in tensors.items():
        file.add(SavedTensor.of(key, tensor))
    file.finish()
    return TensorStore(folder)


def widened(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2) else tensor).numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_a_stored_value_are_what_the_safetensors_library_reads(dtype, tmp_path):
    store(tmp_path, {"odd": torch.tensor([True, False, True]), "x": some(dtype)})
    if dtype.is_complex and tuple(map(int, version("safetensors").split(".")[:2])) < (0, 7):
        pytest.skip("the safetensors library reads complex numbers since 0.7")
    with safe_open(tmp_path / "tensors.safetensors", "pt") as file:
        assert file.get_tensor("x").dtype == dtype
        assert torch.equal(file.get_tensor("x").view(torch.uint8), some(dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128], ids=str)
def test_a_stored_value_is_read_back_exactly(dtype, tmp_path):
    array = store(tmp_path, {"odd": torch.tensor([True]), "x": some(dtype)}).array("x")
    np.testing.assert_array_equal(array, widened(some(dtype)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16], ids=str)
def test_every_bit_pattern_of_a_small_float_is_widened_as_torch_does(dtype, tmp_path):
    bits = torch.arange(65536).to(torch.uint16) if dtype == torch.bfloat16 else torch.arange(256).to(torch.uint8)
    tensor = bits.view(dtype)
    np.testing.assert_array_equal(store(tmp_path, {"x": tensor}).array("x"), tensor.float().numpy())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_scalars_and_empty_values_keep_their_shape(shape, tmp_path):
    assert store(tmp_path, {"x": torch.ones(shape)}).array("x").shape == shape


@pytest.mark.parametrize(
    ("held", "reserve"), [(1 << 20, 64), (0, 64), (0, 1 << 18)], ids=["held", "streamed", "streamed, room"]
)
def test_a_header_that_outgrows_its_room_moves_the_values(held, reserve, tmp_path):
    tensors = {f"{'long' * 20}.{i}": torch.full((3,), i, dtype=torch.int16) for i in range(200)}
    again = store(tmp_path, tensors, reserve=reserve, held=held)
    with safe_open(tmp_path / "tensors.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(key), tensor) for key, tensor in tensors.items())
    assert all((again.array(key) == tensor.numpy()).all() for key, tensor in tensors.items())


@pytest.mark.parametrize("reserve", [64, 1 << 18])
def test_values_of_many_sizes_that_are_streamed_are_read_back(reserve, tmp_path):
    sizes = [0, 1, 4095, 4096, 4097, 0, 3 << 20, 5, (9 << 20) + 1, 1 << 20]
    tensors = {f"x.{i}": torch.randint(0, 256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    again = store(tmp_path, tensors, reserve=reserve, held=4096)
    with safe_open(tmp_path / "tensors.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(key), tensor) for key, tensor in tensors.items())
    assert all((again.array(key) == tensor.numpy()).all() for key, tensor in tensors.items())


def test_a_value_that_is_not_contiguous_is_stored_in_logical_order(tmp_path):
    x = torch.arange(6).reshape(2, 3).T
    np.testing.assert_array_equal(store(tmp_path, {"x": x}).array("x"), x.numpy())


# ---- through the sink ----------------------------------------------------------------------------------------------


def write(folder, **fields):
    step_data = small_step(task="tensor")
    sink = dump.open(folder, plan_for(folder, task="tensor", **fields), Place())
    for number, value in enumerate(step_data.values):
        value.tensor = f"value.{number}"
        sink.tensor(0, SavedTensor.of(value.tensor, torch.full((2, 3), float(number))))
    sink.write(step_data)
    sink.close()
    return folder / "step0/rank0"


def test_a_header_that_outgrew_its_room_has_more_in_the_next_step(tmp_path):
    sink = dump.open(tmp_path, plan_for(tmp_path, task="tensor"), Place())
    tensors = {f"{'long' * 30}.{i}": torch.full((7,), i, dtype=torch.int16) for i in range(1500)}
    tensors["large"] = torch.randint(0, 256, (17 << 20,), dtype=torch.uint8)
    rooms, headers = [], []
    for step in range(2):
        for key, tensor in tensors.items():
            sink.tensor(step, SavedTensor.of(key, tensor))
        sink.write(small_step(step, task="tensor"))
        path = tmp_path / f"step{step}/rank0/tensors.safetensors"
        with path.open("rb") as file:
            rooms.append(int.from_bytes(file.read(8), "little"))
            headers.append(len(file.read(rooms[-1]).rstrip()))
        with safe_open(path, "pt") as file:
            assert all(torch.equal(file.get_tensor(key), tensor) for key, tensor in tensors.items())
    sink.close()
    assert headers[0] == headers[1] > 1 << 18
    assert rooms[0] < headers[0] + 4096
    assert rooms[1] >= headers[1] * 9 // 8


@pytest.mark.parametrize("tensor_format", ["safetensors", "pt", "npy"])
def test_every_place_of_a_value_leads_to_its_tensor(tensor_format, tmp_path):
    rank = write(tmp_path, tensor_format=tensor_format)
    tensors = TensorStore(rank)
    found = [float(tensors.array(record.tensor).mean()) for record in read(rank).records() if record.tensor]
    assert found == [0, 2, 1, 0, 2, 1, 3, 4, 4, 3, 4]


def test_a_value_is_stored_once_however_many_places_it_has(tmp_path):
    assert len(list(TensorStore(write(tmp_path)).names())) == 5


def test_files_for_existing_tools_are_named_for_their_places(tmp_path):
    files = {path.name for path in (write(tmp_path, tensor_format="pt") / "dump_tensor_data").iterdir()}
    assert files == {
        "Module.layers.0.Block.forward.0.input.0.pt",
        "Module.layers.0.Block.forward.0.output.0.pt",
        "Module.layers.0.Block.forward.0.parameters.weight.pt",
        "Functional.linear.0.forward.input.0.pt",
        "Functional.linear.0.forward.input.1.pt",
        "Functional.linear.0.forward.output.0.pt",
        "Functional.linear.0.backward.input.0.pt",
        "Functional.linear.0.backward.output.0.pt",
        "Module.layers.0.Block.parameters_grad.0.weight.pt",
        "Module.layers.0.Block.backward.0.input.0.pt",
        "Module.layers.0.Block.backward.0.output.0.pt",
    }


def test_a_key_that_is_no_file_name_becomes_one_that_is_told_apart():
    assert file_name("a/../b", "pt") != file_name("a_.._b", "pt")
    assert "/" not in file_name("a/../b", "pt")
    assert not file_name("..", "pt").startswith(".")


def test_a_size_budget_ends_the_tensors_with_a_finding_and_the_files_stay_valid(tmp_path):
    sink = dump.open(tmp_path, plan_for(tmp_path, task="tensor", max_bytes=50), Place())
    step_data = small_step(task="tensor")
    more = []
    for number, value in enumerate(step_data.values):
        value.tensor = f"value.{number}"
        more.append(sink.tensor(0, SavedTensor.of(value.tensor, np.zeros((2, 3), np.float32))))
    sink.write(step_data)
    said = sink.warnings_made()
    assert more == [True, True, False, False, False]
    assert list(TensorStore(tmp_path / "step0/rank0").names()) == ["value.0", "value.1"]
    assert {record.tensor for record in read(tmp_path / "step0").records()} == {"value.0", "value.1", None}
    assert len(said) == 1
    assert "max_bytes is 50" in said[0].message
