"""List, show, compare and convert what an NPU or MindSpore wrote of single kernels. Nothing of CANN is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from trainprobe.engine.compare import measure
from trainprobe.engine.plan.file import read_plan_file
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.storage.kernel_dumps.read import overflows_of
from trainprobe.engine.storage.kernel_dumps.store import KernelStore
from trainprobe.errors import CompareError, FormatError, OutputError, UsageError
from trainprobe.kernel_dump.settings import dump_settings
from trainprobe.kernel_dump.tensors import dump_steps, named_tensor, rows_of, shown, statistics_of, undone_format

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, no_args_is_help=True)
_MOST_TEXT = 1 << 20  # elements


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False)


@app.command("list")  # pyright: ignore[reportUntypedFunctionDecorator]
def list_kernels(
    dump: Annotated[Path, typer.Argument(help="a dump: its folder, a step or a rank of it, or one dump file")],
    pattern: Annotated[str, typer.Argument(help="kernels, modules or operator names, such as '*matmul*'")] = "*",
    statistics: Annotated[bool, typer.Option("--statistics", "-s", help="show max, min, mean and norm of each tensor")] = False,
) -> int:
    """List the kernels that ran, in their order, with their tensors. Exit code: 0, or 1 where nothing fits the pattern."""
    console, found = _console(), 0
    for folder, step_data in dump_steps(dump):
        kernels = sum(call.kind == "op" for call in step_data.calls)
        console.print(f"step {step_data.step}, rank {step_data.place.rank}: {kernels} kernels in {folder}")
        for where, slot, value, numbers in rows_of(step_data, pattern):
            found += 1
            form = (value.extra or {}).get("format", "")
            line = f"  {where}  {slot}: {value.dtype} {list(value.shape)}{f' {form}' if form else ''}"
            console.print(f"{line}  {value.note or shown(numbers)}" if statistics else line)
            if value.tensor and statistics:
                console.print(f"      {value.tensor}")
        for note in step_data.notes:
            console.print(f"  note: {note}")
        for overflow, ran in overflows_of(folder):
            console.print(f"  overflow: {overflow}: {' or '.join(ran) or 'the dump holds no kernel of that task'}")
    return int(not found)


@app.command()  # pyright: ignore[reportUntypedFunctionDecorator]
def configure(
    plan: Annotated[Path, typer.Argument(help="a plan, or a config.json of mindstudio-probe, also of level L2")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write; one that exists is not replaced")],
    device: Annotated[str, typer.Option("--device", "-d", help="cpu, gpu or ascend: what the training runs on")] = "ascend",
    asynchronous: Annotated[bool, typer.Option("--async", help="let Ascend write in the background")] = False,
) -> int:
    """Write the settings with which MindSpore itself dumps each kernel of the steps that a plan selects."""
    if device not in ("cpu", "gpu", "ascend"):
        raise UsageError(f"--device {device} is none of cpu, gpu and ascend")
    fields = read_plan_file(plan)
    if fields.get("level") == "L2":
        fields["level"] = "L1"  # kernels are what the settings are about
    loaded = load_plan(fields)
    settings = json.dumps(dump_settings(loaded, device, asynchronous), indent=2)
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(settings + "\n")
    except OSError as error:
        raise OutputError(f"{output} was not written ({error.strerror}): choose another file") from None
    console = _console()
    for note in loaded.notes:
        console.print(f"note: {note}")
    if device == "cpu" and loaded.task != "tensor":
        console.print("note: on a CPU MindSpore dumps values and no statistics; the readers compute them")
    console.print("start the training in graph mode, without MS_ACL_DUMP_CFG_PATH, as")
    console.print(f"  MINDSPORE_DUMP_CONFIG={output.resolve()} python train.py")
    console.print(f"and then read {loaded.output.resolve()}, for example with")
    console.print(f"  trainprobe kernel-dump list {loaded.output.resolve()} -s")
    return 0


@app.command()  # pyright: ignore[reportUntypedFunctionDecorator]
def show(
    tensor: Annotated[str, typer.Argument(help="FILE, or FILE:input.0 where the file holds several tensors")],
    elements: Annotated[int, typer.Option("--elements", "-n", help="how many first elements to print")] = 20,
) -> int:
    """Show one tensor: its shape, statistics and first elements."""
    array, dtype, name = named_tensor(tensor)
    console = _console()
    console.print(f"{name}: {dtype} {list(array.shape)}")
    console.print(f"  {shown(statistics_of(array))}")
    first = array.reshape(-1)[: max(0, elements)]
    console.print(f"  {' '.join(str(x) for x in first.tolist())}{' …' if first.size < array.size else ''}")
    return 0


@app.command()  # pyright: ignore[reportUntypedFunctionDecorator]
def compare(
    a: Annotated[str, typer.Argument(help="FILE or FILE:output.0, a dump file or an .npy")],
    b: Annotated[str, typer.Argument(help="the other one")],
) -> int:
    """Compare two tensors. Exit code: 0 the same numbers, 1 different ones, 3 not comparable."""
    (x, dtype_a, name_a), (y, dtype_b, name_b) = named_tensor(a), named_tensor(b)
    if x.shape != y.shape:
        raise CompareError(f"{name_a} has the shape {list(x.shape)} and {name_b} {list(y.shape)}: they cannot be compared")
    if not x.size:
        raise CompareError(f"{name_a} and {name_b} hold no element: there is nothing to compare")
    found = measure(x, y)
    console = _console()
    console.print(f"a: {name_a}: {dtype_a}, {shown(statistics_of(x))}\nb: {name_b}: {dtype_b}, {shown(statistics_of(y))}")
    if not found.changed:
        console.print(f"all {found.count} elements are the same")
        return 0
    worst = f"{list(found.at)}: {x[found.at]!s} and {y[found.at]!s}" if found.at is not None else "no finite pair"
    console.print(f"{found.changed} of {found.count} elements differ; largest difference {found.max_abs:.6g} at {worst}")
    norms = (found.square_a * found.square_b) ** 0.5
    cosine = f"{found.dot / norms:.9f}" if norms else "not defined"
    console.print(f"relative l2 {found.relative_l2:.6g}, cosine {cosine}, at most {found.max_ulp:.6g} ulp")
    if found.misplaced:
        console.print(f"{found.misplaced} elements are NaN or infinite on one side alone")
    return 1


@app.command()  # pyright: ignore[reportUntypedFunctionDecorator]
def convert(
    dump: Annotated[Path, typer.Argument(help="a dump file, or a folder with dump files in it")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder to write to; files in it are not replaced")],
    kind: Annotated[str, typer.Option("--type", "-t", help="npy or txt")] = "npy",
    original: Annotated[
        bool, typer.Option("--original-shape", help="turn FRACTAL_NZ and NC1HWC0 into the shape of the program")
    ] = False,
) -> int:
    """Write each tensor as .npy, or as .txt with one number a line.

    Exit code: 0 all were written, 1 some could not be read, 3 none was written.
    """
    if kind not in ("npy", "txt"):
        raise UsageError(f"--type {kind} is neither npy nor txt")
    store, console = KernelStore(dump), _console()
    output.mkdir(parents=True, exist_ok=True)
    written, tensors = 0, store.tensors()
    failed = list(store.unread)
    for key, told in tensors.items():
        try:
            array = store.array(key)
            if original and told.original_shape and told.original_shape != array.shape:
                array = undone_format(array, told.format, told.original_shape)
        except FormatError as error:
            failed.append(str(error))
            continue
        target = output / f"{key.replace('/', '_').replace('#', '.').removesuffix('.npy').removesuffix('.bin')}.{kind}"
        _write(target, np.asarray(array), kind)
        written += 1
    console.print(f"{written} tensors written to {output}")
    for sentence in failed:
        console.print(f"not written: {sentence}")
    return int(bool(failed)) if written else 3


def _write(target: Path, array: np.ndarray, kind: str) -> None:
    if kind == "txt" and array.size > _MOST_TEXT:
        raise UsageError(f"{target.name} would have {array.size} lines, more than {_MOST_TEXT}: convert it to npy")
    try:
        with target.open("xb") as file:
            if kind == "npy":
                np.save(file, array, allow_pickle=False)
            else:
                file.writelines(f"{x}\n".encode() for x in array.reshape(-1).tolist())
    except FileExistsError:
        raise OutputError(f"{target} exists and is left as it is: choose another folder") from None
