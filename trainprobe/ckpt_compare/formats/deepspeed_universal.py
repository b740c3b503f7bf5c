"""DeepSpeed universal checkpoints: `zero/<parameter>/fp32.pt`, `exp_avg.pt`, … each holding a whole parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats.deepspeed import aliases, sections, shapes_of
from trainprobe.ckpt_compare.formats.plain_torch import arrays, clean
from trainprobe.ckpt_compare.optimizer_names import is_array, one_or_all, scalar
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Problem, Reshaped, Source, gather, whole
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.ckpt_compare.storage.mapped import inside, read_text
from trainprobe.engine.geometry.rectangles import Point
from trainprobe.errors import FormatError


def tag_folder(path: Path) -> Path | None:
    """Return the folder with `zero/`: the path itself, or what `latest_universal` in it points to."""
    if not path.is_dir():
        return None
    latest = path / "latest_universal"
    return inside(path, read_text(latest).strip()) if latest.is_file() else path


def sniff(path: Path) -> bool:
    """A folder with `zero/<parameter>/fp32.pt`, or one that points to it."""
    folder = tag_folder(path)
    return folder is not None and any(folder.glob("zero/*/fp32.pt"))


def open(path: Path) -> Checkpoint:
    """Open a universal checkpoint; weights are those of the model file where it holds them, else the fp32 ones."""
    folder = tag_folder(path) or path
    problems: list[Problem] = []
    models = [(f, torch_archive.load(str(f))) for f in sorted(folder.glob("*_model_states.pt"))]
    shapes = {n: s for _, content in models for group in shapes_of(content) for n, s in group.items()}
    steps: set[float] = set()
    tensors = list(_parameters(folder, shapes, steps, problems, _untrained([content for _, content in models])))
    weights = [
        whole(clean(k), a, f"{f.name}: {k}")
        for f, c in models[:1]
        for k, a in arrays(c.get("module") or {})
        if 0 not in a.shape
    ]
    held = {t.name for t in weights}
    weights += [replace(t, slot="") for t in tensors if t.slot == "master" and t.name not in held]
    weights += aliases([content for _, content in models], [*weights, *tensors])
    state = sections(models[0][1]) if models else {}
    steps |= _common_steps(folder)
    if steps:
        state["optimizer"] = {"step": one_or_all(steps)}
    return Checkpoint(str(path), "deepspeed_universal", gather([*weights, *tensors]), state=state, problems=tuple(problems))


def _untrained(models: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of buffers and aliases: the converter writes an fp32 file for them too, which no optimizer has."""
    return {clean(name) for content in models for key in ("buffer_names", "shared_params") for name in content.get(key) or ()}


def _parameters(
    folder: Path, shapes: Mapping[str, Point], steps: set[float], problems: list[Problem], untrained: set[str]
) -> Iterator[LogicalTensor]:
    for file in sorted(folder.glob("zero/*/*.pt")):
        name, slot = clean(file.parent.name), "master" if file.stem == "fp32" else file.stem
        if name in untrained:
            continue
        try:
            content = torch_archive.load(str(file))
        except FormatError as error:
            problems.append(Problem(str(file), str(error)))
            continue
        array: Any = content.get("param") if isinstance(content, Mapping) else content
        if slot == "step":
            steps.add(scalar(content if array is None else array))
        elif is_array(array):
            yield whole(name, _shaped(array, shapes.get(name)), f"zero/{file.parent.name}/{file.name}", slot=slot)


def _shaped(array: Source, shape: Point | None) -> Source:
    """Give a flat array of ZeRO 3 the shape that the model file knows."""
    return Reshaped(array, shape) if shape is not None and len(array.shape) == 1 and array.shape != shape else array


def _common_steps(folder: Path) -> set[float]:
    file = folder / "zero" / "optimizer_state.pt"
    if not file.is_file():
        return set()
    return {scalar(v) for at, v in torch_archive.leaves(torch_archive.load(str(file))) if at[-1] == "step"}
