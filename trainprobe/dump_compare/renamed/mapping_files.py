"""Reads the mapping files of mindstudio-probe: of values, of modules (cells), of layers, and of operators of two frameworks.

| kind | what it looks like |
|---|---|
| data | `Functional.linear.0.forward.input.0: NPU.npu_linear.0.forward.input.0`: single values |
| cell | `fc2.Dense: fc2.Linear`: a module with its class, or any part of that, of which the first occurrence is replaced |
| layer | `ParallelMLP: {mapping: dense_h_to_4h}`: what is within modules of a class; `TopLayer` (or `Cell`) is above all |
| api | `ms_api`, `pt_api`, and which arguments and outputs of the two belong together |

Which kind a file is follows from what it holds. The left side is A's, but for operators, which are told by framework.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.safe_files import load_yaml
from trainprobe.errors import FormatError

_VALUE = re.compile(
    r"\.(forward|backward)\.(\d+\.)?(input|output|kwargs|parameters)(\.|$)|\.\d+\.(forward|backward)\.|\.parameters_grad(\.|$)"
)
TOP, _OLD_TOP = "TopLayer", "Cell"  # stand for what is above all layers


@dataclass(frozen=True, slots=True)
class Api:
    """An operator of MindSpore and one of PyTorch. args, outputs: (place in MindSpore's, place in PyTorch's), each."""

    mindspore: str
    pytorch: str
    args: tuple[tuple[int, int], ...] = ()
    outputs: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class MappingFile:
    """What users say belongs together. layers: class → path within it → path in B, longest first."""

    values: dict[str, str] = field(default_factory=dict[str, str])
    cells: dict[str, str] = field(default_factory=dict[str, str])
    layers: dict[str, list[tuple[str, str]]] = field(default_factory=dict[str, list[tuple[str, str]]])
    apis: list[Api] = field(default_factory=list[Api])


def read_mappings(paths: Sequence[Path]) -> MappingFile | None:
    """Return what some files say together, None of no files. Raises FormatError that names the file and what is wrong in it."""
    if not paths:
        return None
    made = MappingFile()
    for path in paths:
        _add(made, load_yaml(path, "mapping "), f"mapping {path}")
    return made


def _add(made: MappingFile, data: Any, where: str) -> None:
    entries: list[Any] = data if isinstance(data, list) else [data] if isinstance(data, dict) and "ms_api" in data else []
    if entries:
        made.apis += [_api(entry, f"{where}, entry {number}") for number, entry in enumerate(entries, 1)]
    elif not isinstance(data, dict) or not data:
        raise FormatError(
            f"{where} holds {type(data).__name__ if data is not None else 'nothing'}: expected names of A with those of B, "
            "`NAME: NAME`, layers, `CLASS: {NAME: NAME}`, or a list of ms_api and pt_api"
        )
    elif all(isinstance(value, dict) for value in data.values()):
        _add_layers(made, data, where)
    else:
        _add_names(made, data, where)


def _add_names(made: MappingFile, data: Mapping[Any, Any], where: str) -> None:
    wrong = next((f"{key!r}: {value!r}" for key, value in data.items() if not isinstance(key, str) or not _name(value)), None)
    if wrong is not None:
        raise FormatError(f"{where} has {wrong}: both must be names")
    of_values = {key: bool(_VALUE.search(key)) for key in data}
    if len(set(of_values.values())) == 2:
        other = next(key for key, sides in of_values.items() if not sides)
        raise FormatError(f"{where} names single values and also {other!r}, which is none: keep modules in a file of their own")
    if not all(of_values.values()):
        made.cells |= data
        return
    twice = next((value for i, value in enumerate(data.values()) if value in list(data.values())[:i]), None)
    if twice is not None:
        raise FormatError(f"{where} gives {twice!r} of B to two values of A")
    made.values |= data


def _add_layers(made: MappingFile, data: Mapping[Any, Mapping[Any, Any]], where: str) -> None:
    for cls, names in data.items():
        wrong = next((f"{key!r}: {value!r}" for key, value in names.items() if not _name(key) or not _name(value)), None)
        if wrong is not None:
            raise FormatError(f"{where}, {cls}: has {wrong}: both must be names of what is within the layer")
        found = made.layers.setdefault(TOP if cls == _OLD_TOP else str(cls), [])
        found += [(key, value.partition("(")[0]) for key, value in names.items()]
        found.sort(key=lambda pair: -pair[0].count("."))


def _api(entry: Any, where: str) -> Api:
    if not isinstance(entry, Mapping):
        raise FormatError(f"{where} is {entry!r}: expected ms_api, pt_api and their arguments and outputs")
    for key in ("ms_api", "pt_api"):
        if not _name(entry.get(key)):
            raise FormatError(f"{where} has {key} {entry.get(key)!r}: expected the name of an operator, such as Functional.abs")
    pairs: list[tuple[tuple[int, int], ...]] = []
    for what in ("args", "outputs"):
        mine, theirs = (_places(entry.get(f"{side}_{what}"), f"{where}, {side}_{what}") for side in ("ms", "pt"))
        if len(mine) != len(theirs):
            raise FormatError(
                f"{where} ({entry['ms_api']}) has {len(mine)} ms_{what} and {len(theirs)} pt_{what}: they belong together"
            )
        pairs.append(tuple(zip(mine, theirs, strict=True)))
    return Api(entry["ms_api"], entry["pt_api"], *pairs)


def _places(value: Any, where: str) -> list[int]:
    places = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(place, bool) or not isinstance(place, int) or place < 0 for place in places):
        raise FormatError(f"{where} is {value!r}: expected the places of values, whole numbers from 0")
    if len(set(places)) < len(places):
        raise FormatError(f"{where} is {value!r}: a place stands there twice")
    return places


def _name(value: Any) -> bool:
    return isinstance(value, str) and value != ""
