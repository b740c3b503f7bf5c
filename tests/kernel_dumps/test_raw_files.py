"""Raw dump files of CANN, written by an independent writer: the tensors come back bit for bit, damage is one sentence."""

import random
import re
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
from kernel_files import BF16, HIFLOAT8, overflow_new, overflow_old, raw_dump, tensor, write_kernel, write_overflow

from trainprobe.engine.storage.dumps import open_tensors, read
from trainprobe.engine.storage.kernel_dumps.acl_message import read_raw
from trainprobe.engine.storage.kernel_dumps.read import overflows_of
from trainprobe.errors import FormatError, ProbeError

RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((3, 4)).astype(np.float32), RNG.standard_normal((4, 5)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "uint8", "int32", "int64", "bool"])
def test_every_dtype_comes_back_bit_for_bit_with_its_statistics(tmp_path, dtype):
    x = (RNG.standard_normal((2, 3, 5)) * 50).astype(dtype)
    write_kernel(tmp_path, "Add.layer_Add", [x, x[:1]], [x], op_name="layer/Add")
    step_data, store = read(tmp_path), open_tensors(tmp_path)
    (call,) = step_data.calls
    assert (call.kind, call.name, call.phase) == ("op", "Kernel.Add", "forward")
    first, second, out = *call.args, *call.out
    for value, array in ((first, x), (second, x[:1]), (out, x)):
        assert (value.dtype, value.shape) == (dtype, array.shape)
        assert store.array(value.tensor).tobytes() == np.ascontiguousarray(array).tobytes()
    numbers = step_data.numbers()
    wide = x.astype(np.float64)
    assert numbers["max"][out.row] == wide.max()
    assert numbers["mean"][out.row] == pytest.approx(wide.mean(), rel=1e-12)
    assert numbers["norm"][out.row] == pytest.approx(np.linalg.norm(wide), rel=1e-12)


def test_bfloat16_is_widened_exactly_and_reduced_as_what_it_is(tmp_path):
    bits = RNG.integers(0, 0x7F00, (4, 6)).astype(np.uint16)
    (tmp_path / "Cast.c.1.0.1589195081588018").write_bytes(raw_dump([], [tensor(bits, "output", dtype=BF16)]))
    step_data = read(tmp_path)
    (value,) = step_data.calls[0].out
    assert value.dtype == "bfloat16"
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(open_tensors(tmp_path).array(value.tensor), exact)
    assert step_data.numbers()["max"][value.row] == exact.max()


def test_older_files_that_are_one_message_are_read_too(tmp_path):
    path = tmp_path / "Relu.r.7.1589195081588018"
    path.write_bytes(raw_dump([tensor(A, "input", inline=True)], [tensor(A * 2, "output", inline=True)], "net/r", inline=True))
    step_data = read(path)
    assert np.array_equal(open_tensors(path).array(step_data.calls[0].out[0].tensor), A * 2)


def test_padding_scalars_empty_tensors_and_unknown_dtypes(tmp_path):
    scalar, empty = np.float32(2.5).reshape(()), np.zeros((0, 4), np.float32)
    odd = tensor(np.zeros(6, np.uint8), "output", dtype=HIFLOAT8)
    sides = [tensor(A, "input", padding=16), tensor(scalar, "input")], [tensor(empty, "output"), odd]
    (tmp_path / "Odd.o.1.0.1589195081588018").write_bytes(raw_dump(*sides))
    step_data, store = read(tmp_path), open_tensors(tmp_path)
    (call,) = step_data.calls
    assert np.array_equal(store.array(call.args[0].tensor), A)
    assert store.array(call.args[1].tensor) == scalar
    assert store.array(call.out[0].tensor).shape == (0, 4)
    assert call.out[1].row == -1
    assert "hifloat8" in call.out[1].note


def test_a_name_of_a_scope_in_the_message_names_the_module(tmp_path):
    name = "Gradients/Default/network-WithLossCell/_backbone-Net/block-Block/up-Dense/Grad_MatMul/MatMul-op3"
    write_kernel(tmp_path, f"MatMul.{name.replace('/', '_')}", [A, B], [A @ B], op_name=name)
    *modules, call = read(tmp_path).calls
    assert [(each.kind, each.name, each.phase) for each in modules] == [
        ("module", "block", "backward"),
        ("module", "block.up", "backward"),
    ]
    assert call.name == "Kernel.Gradients.MatMul"
    assert (call.parent.name, call.parent.cls, call.parent.parent.name) == ("block.up", "Dense", "block")


@pytest.mark.parametrize(
    ("report", "unit"),
    [
        (overflow_old("AI Core", 517, 60, 0x20), "AI Core"),
        (overflow_old("L2 Atomic Add", 517, 60, 1), "L2 Atomic Add"),
        (overflow_new(0, 517, 60, 8), "AI Core"),
        (overflow_new(1, 517, 60, 8, version=1), "AI Vector"),
    ],
)
def test_an_overflow_is_told_with_the_kernel_of_its_task(tmp_path, report, unit):
    write_kernel(tmp_path, "MatMul.head", [A, B], [A @ B], task=60, stream=517)
    write_kernel(tmp_path, "Add.tail", [A, A], [A + A], task=61, stream=517)
    write_overflow(tmp_path, report)
    ((overflow, kernels),) = overflows_of(tmp_path)
    assert (overflow.unit, overflow.stream, overflow.task) == (unit, 517, 60)
    assert kernels == ["MatMul head"]


def test_a_missing_library_is_a_sentence_with_its_install(tmp_path):
    path = write_kernel(tmp_path, "Add.a", [A], [A])
    code = "import sys; sys.modules['google.protobuf'] = None; from trainprobe.cli import main; sys.exit(main(sys.argv[1:]))"
    run = subprocess.run([sys.executable, "-c", code, "kernel-dump", "list", path], capture_output=True, text=True)
    assert run.returncode == 3
    assert "pip install 'trainprobe[npu]'" in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_a_link_is_not_followed(tmp_path):
    path = write_kernel(tmp_path / "elsewhere", "Add.a", [A], [A])
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / path.name).symlink_to(path)
    with pytest.raises(FormatError):
        read(tmp_path / "dump")


def _mutated(content: bytes, chance: random.Random) -> bytes:
    data = bytearray(content)
    kind = chance.randrange(6)
    if kind == 0:
        return bytes(data[: chance.randrange(len(data))])
    if kind == 1:  # the length of the header, or a size in it, is huge
        data[:8] = chance.getrandbits(64).to_bytes(8, "little")
    elif kind == 2:
        at = chance.randrange(8, 80)
        data[at:at] = b"\xff" * chance.randrange(1, 12)
    elif kind == 3:
        data += bytes(chance.randrange(200))
    if kind >= 4:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(data)
    for _ in range(chance.randrange(1, 12)):
        data[chance.randrange(min(len(data), 140))] = chance.randrange(256)
    return bytes(data)


def test_500_damaged_files_are_a_sentence_or_an_answer_in_bounded_time_and_memory(tmp_path):
    chance = random.Random(7)
    good = raw_dump(
        [tensor(A, "input", original=(3, 4)), tensor(B, "input")], [tensor(A @ B, "output", op="conv")], "net/MatMul"
    )
    report = write_overflow(tmp_path, overflow_new(0, 1, 2, 8)).read_bytes()
    np.save(tmp_path / "seed.npy", A)
    array = (tmp_path / "seed.npy").read_bytes()
    heading = "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,Max Value,Min Value,L2Norm Value\n"
    table = (heading + 'Add,a,1,0,1589195081588018,output,0,48,float32,"(3,4)",1,-1,2.5\n' * 3).encode()
    seeds = [
        *(("MatMul.m.1.0.1589195081588018", good), ("Opdebug.Node_OpDebug.59.0.1589195081588099", report)),
        *(("Add.a.1.0.1589195081588018.output.0.ND.float32.npy", array), ("statistic.csv", table)),
    ]
    before, answered = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for i in range(500):
        name, content = seeds[i % 4]
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / name).write_bytes(_mutated(content, chance))
        start = time.monotonic()
        try:
            step_data = read(folder)
            overflows_of(folder)
            store = open_tensors(folder)
            for value in step_data.values:
                if value.tensor is not None:
                    store.array(value.tensor)
            answered += 1
        except ProbeError as error:
            assert re.fullmatch(r"[^\n]{20,1500}", str(error)), repr(error)
        assert time.monotonic() - start < 5
    assert 100 < answered < 400  # some damage is in values alone, and some in what says where they are
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_sizes_that_contradict_each_other_are_told(tmp_path):
    message, raw = tensor(A, "output")
    path = tmp_path / "Add.a.1.0.1589195081588018"
    path.write_bytes(raw_dump([], [(message, raw)])[:-4])
    with pytest.raises(FormatError, match="does not fit its"):
        read_raw(path)
