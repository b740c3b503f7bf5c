"""Folders of several models, each in a folder of its own: pipelines of diffusers, and what sentence-transformers saves.

`model_index.json` of diffusers names a folder for each part, `modules.json` of sentence-transformers a path for each module,
often the folder itself for the first. A part without weights, as a scheduler or a pooling, has no model files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats import huggingface
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Problem, gather
from trainprobe.ckpt_compare.storage.mapped import inside, read_json
from trainprobe.errors import FormatError

_PARTS_OF_PIPELINE, _PARTS_OF_SENTENCES = "model_index.json", "modules.json"


def sniff(path: Path) -> bool:
    """A folder that names its parts."""
    return path.is_dir() and any((path / name).is_file() for name in (_PARTS_OF_PIPELINE, _PARTS_OF_SENTENCES))


def open(path: Path) -> Checkpoint:
    """Open all parts; the tensors of a part stand behind the name of its folder."""
    tensors: list[LogicalTensor] = []
    problems: list[Problem] = []
    arguments: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for part, folder in _parts(path).items():
        if not folder.is_dir():
            problems.append(Problem(str(folder), "is missing, and the folder's index names it"))
            continue
        if not huggingface.sniff(folder):
            continue
        held, before = huggingface.open(folder), f"{part}." if part else ""
        tensors += [replace(t, name=before + t.name, native=f"{before}{t.native or t.name}") for t in held.tensors.values()]
        problems += held.problems
        arguments |= {f"{before}{key}": value for key, value in held.state.get("args", {}).items()}
        config = config or {key: value for key, value in held.config.items() if value}
    return Checkpoint(
        str(path), "component_folders", gather(tensors), config=config, state={"args": arguments}, problems=tuple(problems)
    )


def _parts(path: Path) -> dict[str, Path]:
    """Return the name of each part with its folder; "" is the folder itself. Raises FormatError where the index is another."""
    file = next(path / name for name in (_PARTS_OF_PIPELINE, _PARTS_OF_SENTENCES) if (path / name).is_file())
    index: Any = read_json(file)
    if isinstance(index, dict):
        names = [str(name) for name, made in index.items() if isinstance(made, list) and any(made)]  # pyright: ignore
    elif isinstance(index, list) and all(isinstance(module, dict) and "path" in module for module in index):  # pyright: ignore
        names = [str(module["path"]) for module in index]  # pyright: ignore[reportUnknownVariableType]
    else:
        raise FormatError(f"{file} does not name the parts of a model: it is neither a pipeline's dict nor a list of modules")
    return {name: inside(path, name) if name else path for name in names}
