"""The step-scoped dump: `step{N}/rank{R}/` with dump.json, stack.json, construct.json and tensors, as existing tools read it.

A rank's folder appears when it is complete; until then it is hidden (`.rank{R}.partial`). JSON is strictly valid: NaN and
infinities are the strings "nan", "inf" and "-inf", which Python's `float` and existing comparisons understand, unless
`nan_tokens` asks for the bare tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import orjson

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.core.step_layout import layout_of
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.entry_text import DumpText, EntryText, construct_text, dumps, fragment, stacks
from trainprobe.engine.storage.dumps.header import about_calls, header, states_text
from trainprobe.engine.storage.dumps.layout import (
    CONSTRUCT_FILE,
    DEBUG_FILE,
    DUMP_FILE,
    HEADER,
    STACK_FILE,
    Files,
    RankFolder,
    existing_of_rank,
    remove,
)
from trainprobe.engine.storage.dumps.tensor_files import DATA_FOLDER, SavedTensor, SeparateFiles, TensorFiles, open_tensor_files
from trainprobe.errors import OutputError


class _Fixed(NamedTuple):
    """What the steps of one layout have in common: parts of the header, stack.json and construct.json."""

    about: dict[str, Any]
    stacks: bytes
    construct: bytes


class DumpSink:
    """Writes each collected step as a folder. Tensors arrive first and are streamed into the hidden folder of their step."""

    def __init__(self, root: Path, plan: Plan, place: Place) -> None:
        self._root = str(root)
        self._plan = plan
        self._place = place
        self._step: int | None = None
        self._folder: RankFolder | None = None
        self._files: TensorFiles | None = None
        self._stored: set[str] = set()
        self._bytes = 0
        self._reserve = 0  # bytes that the header of a step's tensors takes, so that the next step's need not be moved for it
        self._full = False
        self._warnings: list[Finding] = []
        self._left = False  # a step of an earlier run was left as it is, and that was said

    def tensor(self, step: int, saved: SavedTensor) -> bool:
        """Store one value of a step; return False once the size budget is used up."""
        if self._full or saved.key in self._stored:
            return not self._full
        if self._over(saved.nbytes):
            self._over_budget(step, saved)
            return False
        self._bytes += self._open_files(step).add(saved)
        self._stored.add(saved.key)
        return True

    def chunk(self, step: int, chunk: Any) -> bool:
        """Store many values of a step; return False once the size budget is used up."""
        if (
            self._full
            or self._plan.tensor_format != "safetensors"
            or self._over(chunk.nbytes)
            or not self._stored.isdisjoint(chunk.keys())
        ):
            return all(self.tensor(step, saved) for saved in SavedTensor.all_of(chunk))
        self._bytes += self._open_files(step).add_chunk(chunk)
        self._stored.update(chunk.keys())
        return True

    def _over(self, more: int) -> bool:
        return self._plan.max_bytes is not None and self._bytes + more > self._plan.max_bytes

    def _open_files(self, step: int) -> Any:
        self._begin(step)
        assert self._folder is not None
        if self._files is None:
            self._files = open_tensor_files(self._folder.make(), self._plan.tensor_format, self._reserve)
        return self._files

    def _over_budget(self, step: int, saved: SavedTensor) -> None:
        self._full = True
        self._warnings.append(
            Finding(
                "writer",
                "warning",
                f"tensor values are no longer stored: max_bytes is {self._plan.max_bytes}, {self._bytes} bytes are written and "
                f"{saved.key} of step {step} needs {saved.nbytes} more; raise max_bytes or choose fewer tensors or steps. "
                "Statistics go on.",
                step=step,
                place=self._place,
                measured=float(self._bytes + saved.nbytes),
                expected=float(self._plan.max_bytes or 0),
            )
        )

    def _begin(self, step: int) -> None:
        if self._step == step:
            return
        self._drop()
        self._folder = RankFolder(self._root, step, self._place.rank)
        self._step = step

    def takes(self, step_data: StepData) -> bool:
        """Tell whether a step is dumped."""
        return step_data.dumped

    def write(self, step_data: StepData) -> None:
        """Write one step and make its folder visible.

        A step that is there already stays as it is in a run that continues, and is reported once; else raises OutputError.
        """
        self._begin(step_data.step)
        folder = self._folder
        assert folder is not None
        if self._files is not None:
            self._reserve = max(self._reserve, self._files.finish())
        files = self._texts(step_data, folder)
        self._folder = self._files = self._step = None
        self._stored.clear()
        try:
            folder.complete(files, self._plan.on_existing == "replace")
        except OutputError:
            if self._plan.on_existing != "continue":
                raise
            self._leave(step_data.step)
        except OSError:
            folder.discard()  # its room is needed
            raise

    def _texts(self, step_data: StepData, folder: RankFolder) -> Files:
        suffix = "" if self._plan.tensor_format == "safetensors" else self._plan.tensor_format
        plan = self._plan
        text = EntryText(step_data, nan_tokens=plan.nan_tokens, stored=self._stored, suffix=suffix, sides=plan.entry_sides)
        document = text.document()
        fixed = self._fixed(step_data, document)
        about = header(step_data, fixed.about)
        states = states_text(step_data, lambda value: fragment(text.text(value)))
        end = b'\n },\n "%b": %b\n}\n' % (HEADER.encode(), dumps({**about, "states": states} if states else about).encode())
        whole = b"".join((_top(step_data, self._data_folder(folder)), document.text, end))
        if isinstance(self._files, SeparateFiles):
            self._files.place(text.links)
        if step_data.level == "debug":
            return [(DEBUG_FILE, whole)]
        return [(DUMP_FILE, whole), (STACK_FILE, fixed.stacks), (CONSTRUCT_FILE, fixed.construct)]

    def _fixed(self, step_data: StepData, document: DumpText) -> _Fixed:
        """Return what the steps of this layout have in common; it depends on level and framework too."""
        known: dict[tuple[str, str], _Fixed] = layout_of(step_data).derived(self, dict)
        key = step_data.level, step_data.framework
        if key not in known:
            pairs = list(zip(document.names, document.calls, strict=True))
            tree = construct_text(step_data, document.names, document.calls) if self._plan.construct else b"{}"
            about = {name: fragment(dumps(item)) for name, item in about_calls(step_data, pairs).items()}
            known[key] = _Fixed(about, orjson.dumps(stacks(step_data, pairs), option=orjson.OPT_INDENT_2), tree)
        return known[key]

    def _leave(self, step: int) -> None:
        """Say once that a run which was resumed before its last step comes by steps that it has dumped already."""
        if self._left:
            return
        self._left = True
        self._warnings.append(
            Finding(
                "writer",
                "warning",
                f"step {step} was dumped before, in {self._root}, and stays as it is, like each later one that is there. "
                "Choose another output to dump them again.",
                step=step,
                place=self._place,
            )
        )

    def _data_folder(self, folder: RankFolder) -> str | None:
        if self._files is None:
            return None
        return str((folder.final if self._plan.tensor_format == "safetensors" else folder.final / DATA_FOLDER).absolute())

    def warnings_made(self) -> list[Finding]:
        """Return what there is to say since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def close(self) -> None:
        """Drop a step that never ended."""
        self._drop()

    def _drop(self) -> None:
        if self._files is not None:
            self._files.discard()
        if self._folder is not None:
            self._folder.discard()
        self._folder = self._files = self._step = None
        self._stored.clear()


def _top(step_data: StepData, data_folder: str | None) -> bytes:
    task, level, framework, folder = map(dumps, (step_data.task, step_data.level, step_data.framework, data_folder))
    return (
        f'{{"task": {task},\n "level": {level},\n "framework": {framework},\n "dump_data_dir": {folder},\n "data": {{'.encode()
    )


def open(folder: Path, plan: Plan, place: Place) -> DumpSink:
    """Open the dump of one rank. Raises OutputError when the folder holds steps of this rank and the plan refuses that."""
    there = list(existing_of_rank(folder, place.rank))
    whole = [path for path in there if not path.name.startswith(".")]
    if whole and plan.on_existing in ("beside", "refuse"):
        raise OutputError(
            f"{folder} holds a dump already ({whole[0]}, {len(whole)} steps of rank {place.rank}), and nothing is overwritten: "
            "choose another folder, or set on_existing to continue or replace"
        )
    for path in there:
        if path not in whole or plan.on_existing == "replace":
            remove(path)
    return DumpSink(folder, plan, place)
