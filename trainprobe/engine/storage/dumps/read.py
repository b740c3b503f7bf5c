"""Reads dumps back as collected steps: ours and those of other tools, in their old and new dialects.

Files may come from anywhere. Nothing in them is run, no name in them leads out of their folder, and sizes and depths have
limits; what cannot be understood is a FormatError that names the file and the entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.compare.uncollected import uncollected
from trainprobe.engine.core.records import Call, Place
from trainprobe.engine.core.step_data import BESIDE, StoredStepData, ValuesOfCalls, slots, unwrap
from trainprobe.engine.storage.dumps.entries import NOT_READ, parse_entry
from trainprobe.engine.storage.dumps.header import read_place, read_scalars, spread
from trainprobe.engine.storage.dumps.layout import CONSTRUCT_FILE, DEBUG_FILE, DUMP_FILE, HEADER, STACK_FILE, find_ranks
from trainprobe.engine.storage.dumps.leaves import Leaves, NoNumber
from trainprobe.engine.storage.kernel_dumps.file_names import holds_kernels, parse_name
from trainprobe.engine.storage.kernel_dumps.read import KERNEL_LEVEL, read_kernels
from trainprobe.engine.storage.left_out import damaged_as
from trainprobe.engine.storage.safe_files import read_bounded
from trainprobe.errors import FormatError

LARGEST = 8 << 30
DEPTH = 400


def read(path: Path | str) -> StoredStepData:
    """Read one rank of one step: a rank's folder, a `dump.json` or `debug.json`, or a step's folder with one rank in it.

    A folder with the dump files of kernels, or one such file, is read as a step too (see kernel_dumps.read). Raises FormatError
    when there is no dump there, when there are several ranks (use `read_step`), or when it cannot be read.
    """
    path = Path(path)
    if parse_name(path) is not None and path.is_file():
        return read_kernels(path)
    for file in (path, path / DUMP_FILE, path / DEBUG_FILE):
        if file.is_file():
            with damaged_as(str(file)):
                return _read_rank(file)
    if holds_kernels(path):
        return read_kernels(path)
    ranks = find_ranks(path)
    if len(ranks) == 1:
        return read(next(iter(ranks.values())))
    if ranks:
        raise FormatError(f"{path} holds {len(ranks)} ranks: name one of them, such as {next(iter(ranks.values()))}")
    raise FormatError(f"no dump at {path}: expected dump.json, debug.json or rank folders (rank0, …) there")


def not_read(step_data: StoredStepData) -> list[str]:
    """Return what of a step's dump could not be read, a sentence each."""
    kernels = step_data.level == KERNEL_LEVEL
    return [note for note in step_data.notes if kernels or note.endswith(NOT_READ)]


def read_step(path: Path | str) -> dict[int, StoredStepData]:
    """Read all ranks of a step's folder: rank → collected step. Raises FormatError when there is none."""
    ranks = find_ranks(Path(path))
    if not ranks:
        step_data = read(path)
        return {step_data.place.rank: step_data}
    return {rank: read(folder) for rank, folder in ranks.items()}


def load_json(path: Path) -> Any:
    """Parse JSON with or without the bare tokens NaN and Infinity. Raises FormatError with the file and the reason."""
    content = _content(path)
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(content)
    except RecursionError:
        raise FormatError(f"{path} is nested too deeply to be a dump") from None
    except ValueError as error:
        raise FormatError(f"{path} is not JSON ({error}); a run that was killed may have left it incomplete") from None


def _content(path: Path) -> bytes:
    try:
        return read_bounded(path, LARGEST, follow=True)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error}") from error


@uncollected()
def _read_rank(path: Path) -> StoredStepData:
    top = load_json(path)
    data = top.get("data") if isinstance(top, dict) else None
    if not isinstance(data, dict):
        raise FormatError(f"{path} is no dump: it has no object `data`")
    own = top.get(HEADER)
    head: dict[str, Any] = own if isinstance(own, dict) else {}
    leaves = Leaves(tuple(head.get("wanted", ())))
    calls: list[Call] = []
    by_name: dict[str, Call] = {}
    notes = [str(note) for note in head.get("notes", ())]
    for name in list(data):
        entry = data.pop(name)  # what was read is let go, so that the file's content and the step are not both in memory
        call = parse_entry(name)
        if call is None:
            notes.append(f"entry {name!r} {NOT_READ}")
            continue
        try:
            _fill(call, entry, leaves)
        except (ArithmeticError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise FormatError(f"{path}: entry {name!r} cannot be read: {error}") from None
        calls.append(call)
        by_name[name] = call
    calls = calls if head else _gradients_last(calls)
    try:
        states = list(_states(head, leaves))
        return _assemble(path, top, head, calls, by_name, leaves, notes, states)
    except NoNumber as error:
        named = ((name, value.row) for name, call in by_name.items() for _, value in slots(call))
        name = next((name for name, row in named if row == error.row), HEADER)
        raise FormatError(f"{path}: entry {name!r} cannot be read: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise FormatError(f"{path}: its header cannot be read: {error}") from None


def _gradients_last(calls: list[Call]) -> list[Call]:
    """Return calls in the order of execution: up to 8.1 mindstudio-probe lists gradients of weights with their forwards."""
    backwards = [i for i, call in enumerate(calls) if call.phase == "backward" and call.kind in ("module", "op")]
    if not backwards:
        return calls
    forwards = [i for i in range(backwards[0]) if calls[i].kind in ("module", "op")]
    early = [i for i in range(max(forwards, default=0)) if calls[i].kind == "parameter"]
    if not early:
        return calls
    of_module = {calls[i].name: i for i in backwards if calls[i].kind == "module"}
    places: dict[int, float] = {i: of_module.get(calls[i].name, backwards[-1]) + 0.5 for i in early}
    return [calls[i] for i in sorted(range(len(calls)), key=lambda i: places.get(i, i))]


def _assemble(
    path: Path,
    top: Mapping[str, Any],
    head: Mapping[str, Any],
    calls: list[Call],
    by_name: Mapping[str, Call],
    leaves: Leaves,
    notes: list[str],
    states: list[Call],
) -> StoredStepData:
    _apply_header(head, calls, by_name)
    _read_construct(path.with_name(CONSTRUCT_FILE), by_name, "micro" not in head)
    finished, absent, checksums, crc32, partials = leaves.columns()
    return StoredStepData(
        step=int(head["step"]) if "step" in head else _number(path.parent.parent, r"step(\d+)"),
        place=read_place(head["place"]) if "place" in head else Place(_number(path.parent, r"rank(\d+)")),
        framework=str(top.get("framework") or "pytorch"),
        level=str(top.get("level") or "L1"),
        task=str(top.get("task") or "statistics"),
        calls=calls,
        values=ValuesOfCalls([*calls, *states]),
        partials=partials,
        checksums=checksums,
        statistics=tuple(finished),
        crc32=crc32,
        histograms=leaves.histograms or None,
        quantiles=leaves.quantiles or None,
        scalars=read_scalars(head.get("scalars", {})),
        stacks=_read_stacks(path.with_name(STACK_FILE), by_name),
        notes=tuple(notes),
        complete=bool(head.get("complete", True)),
        finished=finished,
        absent=absent,
        states=states,
    )


def _states(head: Mapping[str, Any], leaves: Leaves) -> Iterator[Call]:
    """Yield what the header says of parameters and optimizers (see header.states_text)."""
    for name, moment, micro, values in head.get("states", ()):
        call = Call("state", str(name), 0, "step", micro=micro)
        call.node = str(moment)
        call.params = {str(slot): leaves.tree(leaf) for slot, leaf in values.items()}
        yield call


def _number(folder: Path, pattern: str) -> int:
    m = re.fullmatch(pattern, folder.name)
    return int(m[1]) if m else 0


def _apply_header(head: Mapping[str, Any], calls: list[Call], by_name: Mapping[str, Call]) -> None:
    """Set what the entries themselves do not say: micro-batch, phase and kind."""
    told = [spread(head.get(key), len(calls), None) for key in ("micro", "phase", "kind")] if head else []
    for call, micro, phase, kind in zip(calls, *told, strict=True) if told else ():
        call.micro = micro
        call.phase = phase or call.phase
        call.kind = kind or call.kind
    for name, node in (head.get("nodes") or {}).items():
        if name in by_name:
            by_name[name].node = str(node)


def _fill(call: Call, entry: Any, leaves: Leaves) -> None:
    """Put the values of an entry into its call."""
    if call.kind == "saved":
        call.args = leaves.tree(entry)
        return
    if not isinstance(entry, dict):
        raise TypeError(f"it is {type(entry).__name__}, not an object")
    if call.kind == "parameter":
        call.params = {str(k): unwrap(leaves.tree(v)) for k, v in entry.items() if not isinstance(v, bool)}
        return
    if entry.get("is_recompute") is True:
        call.phase = "recompute"
    call.args = leaves.tree(entry.get("input_args", entry.get("input")))
    call.out = leaves.tree(entry.get("output"))
    call.kwargs = leaves.tree(entry.get("input_kwargs") or None)
    params = {key: entry[key] for key in BESIDE if entry.get(key)} if call.kind == "op" else entry.get("parameters")
    call.params = leaves.tree(params or None)


def _read_stacks(path: Path, by_name: Mapping[str, Call]) -> list[list[str]]:
    """Read stack.json in either dialect: number → [entries, frames], or entry → frames."""
    if not path.is_file():
        return []
    content = load_json(path)
    if not isinstance(content, dict):
        raise FormatError(f"{path} is not an object")
    stacks: list[list[str]] = []
    known: dict[tuple[str, ...], int] = {}
    for key, item in content.items():
        entries, frames = item if _is_shared(item) else ([key], item)
        lines = tuple(str(frame) for frame in (frames if isinstance(frames, list) else [frames]))
        if lines not in known:
            known[lines] = len(stacks)
            stacks.append(list(lines))
        for name in entries:
            if isinstance(name, str) and name in by_name:
                by_name[name].stack = known[lines]
    return stacks


def _is_shared(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)  # pyright: ignore[reportUnknownArgumentType]


def _read_construct(path: Path, by_name: Mapping[str, Call], micro: bool) -> None:
    """Read construct.json: entry → parent, or entry → [parent, micro-batch]. micro: take the micro-batches from it."""
    if not path.is_file():
        return
    content = load_json(path)
    if not isinstance(content, dict):
        raise FormatError(f"{path} is not an object")
    for name, node in content.items():
        call = by_name.get(name)
        if call is None:
            continue
        parent = node
        if isinstance(node, list) and len(node) == 2:  # pyright: ignore[reportUnknownArgumentType]
            parent = node[0]
            call.micro = node[1] if micro and isinstance(node[1], int) else call.micro
        if isinstance(parent, str):
            call.parent = by_name.get(parent, parent)
