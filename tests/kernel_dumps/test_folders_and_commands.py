"""Kernel dumps in the folder layouts of MindSpore and CANN, through the commands that a user calls."""

import numpy as np
import pytest
from kernel_files import overflow_new, raw_dump, tensor, write_kernel, write_overflow

from trainprobe.cli import main
from trainprobe.engine.storage.dumps import open_tensors, read
from trainprobe.engine.storage.dumps.layout import find_dumps

RNG = np.random.default_rng(1)
X, W = RNG.standard_normal((4, 6)).astype(np.float32), RNG.standard_normal((6, 3)).astype(np.float32)
T = 1589195081588000
SCOPE = "Default_network-WithLossCell__backbone-Net_block-Block_up-Dense_MatMul-op0"
WHOLE = "Default/network-WithLossCell/_backbone-Net/block-Block/up-Dense/MatMul-op0"
HEADING = (
    "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,Max Value,Min Value,Avg Value,Count,"
    "Negative Zero Count,Positive Zero Count,NaN Count,Negative Inf Count,Positive Inf Count,Zero Count,L2 Value,MD5\n"
)


def three_kernels(folder, bad=None, shift=0.0):
    """A product, a kernel that takes its logarithm, and one that uses that. bad: the kernel that makes a NaN."""
    product = X @ W + np.float32(shift)
    logarithm = np.log(np.abs(product) + 1)
    if bad:
        logarithm[1, 1] = np.nan
    write_kernel(folder, "MatMul.head_MatMul", [X, W], [product], task=1, time=T)
    write_kernel(folder, "Log.head_Log", [product], [logarithm], task=2, time=T + 10)
    write_kernel(folder, "Mul.tail_Mul", [logarithm, logarithm], [logarithm * logarithm], task=3, time=T + 20)


def mindspore(root, values, iteration=0, graph=0, csv=True):
    """MindSpore's layout: one .npy a tensor, and the names of the kernels beside it. values: (slot name, array)."""
    folder = root / "rank_2" / "Net" / str(graph) / str(iteration)
    folder.mkdir(parents=True)
    for i, (slot, array) in enumerate(values):
        np.save(folder / f"MatMul.{SCOPE}.0.0.{T + i}.{slot}.DefaultFormat.Float32.npy", array)
    if csv:
        order = root / "rank_2" / "execution_order"
        order.mkdir(exist_ok=True)
        (order / f"ms_execution_order_graph_{graph}.csv").write_text(f"NodeExecutionOrder-FullNameWithScope\n{WHOLE}\n")
        (root / "rank_2" / "graphs").mkdir(exist_ok=True)
        (root / "rank_2" / "graphs" / f"ms_output_trace_code_graph_{graph}.ir").write_text(
            f"  %1(a) = MatMul(%0)\n      # Fullname with scope: ({WHOLE})\n"
            "      # In file /home/me/net.py:12, 55~62/        return self.up(x)/\n"
            "      # In file /lib/site-packages/mindspore/nn/basic.py:807, 12~39/        x = self.matmul(x, w)/\n"
        )
    return folder


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        ("20201209083353/3/net/11/7", (7, 3)),
        ("step4/20241201103000/1", (4, 1)),
        ("20241201103000/5", (0, 5)),
        ("rank_6/Net/0/9", (9, 6)),
        ("anything", (0, 0)),
    ],
)
def test_step_and_rank_are_read_from_every_layout(tmp_path, layout, place):
    three_kernels(tmp_path / layout)
    ((step, ranks),) = find_dumps(tmp_path).items()
    ((rank, folder),) = ranks.items()
    step_data = read(folder)
    assert (step, rank) == (step_data.step, step_data.place.rank) == place
    assert [call.name for call in step_data.calls] == ["Kernel.MatMul", "Kernel.Log", "Kernel.Mul"]


def test_graphs_of_one_iteration_are_one_step_and_repeated_kernels_are_calls_of_their_own(tmp_path):
    mindspore(tmp_path, [("input.0", X), ("input.1", W), ("output.0", X @ W)])
    twice = [("input.0", X), ("output.0", X @ W), ("input.0", 2 * X), ("output.0", 2 * X @ W)]
    mindspore(tmp_path, twice, graph=3)
    (ranks,) = find_dumps(tmp_path).values()
    step_data, store = read(ranks[2]), open_tensors(ranks[2])
    kernels = [call for call in step_data.calls if call.kind == "op"]
    assert [len(call.args) for call in kernels] == [2, 1, 1]
    last = step_data.calls[-1]
    assert last.parent.name == "block.up"
    assert np.array_equal(store.array(last.args[0].tensor), 2 * X)


def test_the_module_and_the_line_of_the_program_are_told(tmp_path, capsys):
    bad = X @ W
    bad[0, 0] = np.inf
    mindspore(tmp_path, [("input.0", X), ("input.1", W), ("output.0", bad)])
    assert main(["nan-trace", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "the first infinity is of step 0, on rank 2: Kernel.MatMul.0.forward, output, in block.up" in told
    assert "called at File /home/me/net.py, line 12, return self.up(x)" in told
    assert main(["show", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert main(["dump-compare", str(tmp_path), str(tmp_path), "-q"]) == 0


def test_the_first_kernel_that_makes_a_nan_of_finite_inputs_is_named(tmp_path, capsys):
    three_kernels(tmp_path / "good")
    three_kernels(tmp_path / "bad", bad=True)
    assert main(["nan-trace", str(tmp_path / "good")]) == 0
    capsys.readouterr()
    assert main(["nan-trace", str(tmp_path / "bad")]) == 1
    assert "the first NaN is of step 0, on rank 0: Kernel.Log.0.forward, output" in capsys.readouterr().out


def test_an_overflow_is_told_where_every_value_is_finite(tmp_path, capsys):
    three_kernels(tmp_path)
    write_overflow(tmp_path, overflow_new(0, 0, 2, 0x20))
    assert main(["nan-trace", str(tmp_path)]) == 1
    assert "overflow: step 0, rank 0, AI Core, stream 0, task 2, status 0x20: Log head_Log" in capsys.readouterr().out


def test_two_dumps_are_compared_kernel_by_kernel(tmp_path, capsys):
    three_kernels(tmp_path / "a")
    three_kernels(tmp_path / "b")
    three_kernels(tmp_path / "c", shift=0.25)
    assert main(["dump-compare", str(tmp_path / "a"), str(tmp_path / "b"), "-q"]) == 0
    assert main(["dump-compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "the first difference is at Kernel.MatMul.0.forward" in capsys.readouterr().out


def test_statistics_alone_are_a_dump_too(tmp_path, capsys):
    rows = {
        "a": 'MatMul,head,1,0,1589195081588000,output,0,48,float32,"(4,3)",3.5,-2,0.25,12,4,8,0,0,0,0,6.5,abc\n',
        "b": 'MatMul,head,1,0,1589195081588000,output,0,48,float32,"(4,3)",null,null,null,12,0,0,12,0,0,0,nan,abd\n',
    }
    for name, row in rows.items():
        folder = tmp_path / name / "rank_0" / "Net" / "0" / "5"
        folder.mkdir(parents=True)
        (folder / "statistic.csv").write_text(HEADING + row)
    step_data = read(tmp_path / "a" / "rank_0" / "Net" / "0" / "5")
    (value,) = step_data.calls[0].out
    numbers = {name: column[value.row] for name, column in step_data.numbers().items()}
    assert (step_data.step, value.shape, numbers["max"], numbers["mean"], numbers["norm"]) == (5, (4, 3), 3.5, 0.25, 6.5)
    assert main(["dump-compare", str(tmp_path / "a"), str(tmp_path / "b"), "-q"]) == 2
    assert main(["nan-trace", str(tmp_path / "a")]) == 0
    assert main(["nan-trace", str(tmp_path / "b")]) == 1
    capsys.readouterr()


def test_files_with_names_that_were_too_long_are_found_by_their_mapping(tmp_path):
    path = write_kernel(tmp_path, "MatMul.a_long_name", [X], [W])
    path.rename(tmp_path / "1234567890")
    (tmp_path / "mapping.csv").write_text(f"1234567890,{path.name}\n")
    np.save(tmp_path / f"Add.short.1.0.{T}.output.0.npy", X)
    assert {call.name for call in read(tmp_path).calls} == {"Kernel.MatMul", "Kernel.Add"}


def test_the_habits_of_the_parse_tool_are_commands(tmp_path, capsys):
    three_kernels(tmp_path / "a")
    three_kernels(tmp_path / "c", shift=0.25)
    first, other = (str(next((tmp_path / name).glob("MatMul*"))) for name in "ac")
    assert main(["kernel-dump", "list", str(tmp_path / "a"), "*matmul*", "-s"]) == 0
    listed = capsys.readouterr().out
    assert "step 0, rank 0: 3 kernels" in listed
    assert f"Kernel.MatMul.0  output: float32 [4, 3] ND  max {(X @ W).max():.6g}" in listed
    assert "Kernel.Log" not in listed
    assert main(["kernel-dump", "list", str(tmp_path / "a"), "*conv*"]) == 1
    assert main(["kernel-dump", "show", f"{first}:output.0", "-n", "2"]) == 0
    assert f"{(X @ W)[0, 0]!s}"[:8] in capsys.readouterr().out
    assert main(["kernel-dump", "compare", f"{first}:output.0", f"{first}:output.0"]) == 0
    assert main(["kernel-dump", "compare", f"{first}:output.0", f"{other}:output.0"]) == 1
    assert "largest difference 0.25 at" in capsys.readouterr().out
    assert main(["kernel-dump", "compare", f"{first}:output.0", f"{first}:input.0"]) == 3
    assert main(["kernel-dump", "show", first]) == 3  # which of its three tensors?
    assert "name one, as in" in capsys.readouterr().err
    assert main(["kernel-dump", "convert", first, "-o", str(tmp_path / "npy")]) == 0
    assert main(["kernel-dump", "convert", first, "-o", str(tmp_path / "txt"), "-t", "txt"]) == 0
    (out,) = (tmp_path / "npy").glob("*output.0.npy")
    assert np.array_equal(np.load(out), X @ W)
    (text,) = (tmp_path / "txt").glob("*input.0.txt")
    assert np.array_equal(np.array([float(line) for line in text.read_text().split()], np.float32), X.reshape(-1))
    assert main(["kernel-dump", "convert", first, "-o", str(tmp_path / "npy")]) == 3  # nothing is replaced
    capsys.readouterr()


@pytest.mark.parametrize("form", ["FRACTAL_NZ", "NC1HWC0"])
def test_tensors_in_the_layouts_of_the_device_are_turned_into_the_shape_of_the_program(tmp_path, form):
    original = RNG.standard_normal((20, 37) if form == "FRACTAL_NZ" else (2, 19, 3, 5)).astype(np.float32)
    if form == "FRACTAL_NZ":  # element (i, j) lies at [j // 16, i // 16, i % 16, j % 16]
        device = np.zeros((3, 2, 16, 16), np.float32)
        for i, j in np.ndindex(original.shape):
            device[j // 16, i // 16, i % 16, j % 16] = original[i, j]
    else:  # element (n, c, h, w) lies at [n, c // 16, h, w, c % 16]
        device = np.zeros((2, 2, 3, 5, 16), np.float32)
        for n, c, h, w in np.ndindex(original.shape):
            device[n, c // 16, h, w, c % 16] = original[n, c, h, w]
    path = tmp_path / f"MatMul.m.1.0.{T}"
    path.write_bytes(raw_dump([], [tensor(device, "output", form=form, original=original.shape)]))
    assert main(["kernel-dump", "convert", str(path), "-o", str(tmp_path / "out"), "--original-shape"]) == 0
    assert np.array_equal(np.load(next((tmp_path / "out").iterdir())), original)


def test_what_cannot_be_read_is_noted_and_the_rest_is_read(tmp_path, capsys):
    three_kernels(tmp_path)
    path = next(tmp_path.glob("Log*"))
    path.write_bytes(path.read_bytes()[:60])
    assert main(["kernel-dump", "list", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "step 0, rank 0: 2 kernels" in told
    assert f"note: {path} is no dump of a kernel" in told
