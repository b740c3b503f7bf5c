"""Where a dump lies, `dump_path/step{N}/rank{R}/`, and how a rank's folder appears all at once or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainprobe.engine.storage.kernel_dumps.file_names import holds_kernels
from trainprobe.engine.storage.kernel_dumps.layout import find_kernels
from trainprobe.engine.storage.safe_files import NO_LINK, PRIVATE
from trainprobe.errors import OutputError

DUMP_FILE, DEBUG_FILE, STACK_FILE, CONSTRUCT_FILE = "dump.json", "debug.json", "stack.json", "construct.json"
LOG_FILE, FINDINGS_FILE, METRICS_FILE = "records.jsonl", "findings.jsonl", "metrics.csv"
LIVE_FILE = "metrics.arrow"  # the run log's steps since its last segment
FULL_FILE = "metrics-full.arrow"  # those of which a segment is being made
STEPS_FILE = "steps.json"  # how many steps the writers of a rank were given, and how many they lost
PARTIAL = ".partial"  # ending of a file that is not whole yet
HEADER = "trainprobe"  # key of what this package adds to the top of a dump
_STEP = re.compile(r"step(\d+)")
_RANK = re.compile(r"rank(\d+)")
_PROCESS = re.compile(r"proc(\d+)")
_SEGMENT = re.compile(r"metrics-(\d{6,})\.parquet")

Files = list[tuple[str, bytes]]  # names and texts


class RankFolder:
    """The folder of one rank and step while it is being written, hidden next to its final place until `complete`.

    Each file in it has the ending `.partial` until it is whole, so that the name shows what a killed run left behind.
    Names are text here and not `Path`, which would take as long as the system calls.
    """

    def __init__(self, root: Path | str, step: int, rank: int) -> None:
        self._step = f"{root}{os.sep}step{step}"
        self._final, self._hidden = f"{self._step}{os.sep}rank{rank}", f"{self._step}{os.sep}.rank{rank}.partial"
        self._made = False

    @property
    def final(self) -> Path:
        """Return where the folder will be."""
        return Path(self._final)

    def make(self) -> Path:
        """Return where the folder is until then; it is made if it is not there yet."""
        if not self._made:
            os.makedirs(self._step, exist_ok=True)  # noqa: PTH103
            try:
                os.mkdir(self._hidden)  # noqa: PTH102
            except FileExistsError:  # left over from a run that was killed
                shutil.rmtree(self._hidden)
                os.mkdir(self._hidden)  # noqa: PTH102
            self._made = True
        return Path(self._hidden)

    def complete(self, files: Files, replace: bool) -> None:
        """Write these files and move the folder to its place.

        Raises OutputError when something is there and is not to be replaced, OSError where the disk refuses.
        """
        self.make()
        for name, text in files:
            self._write(name, text)
        self._publish(replace)

    def _write(self, name: str, text: bytes) -> None:
        path = f"{self._hidden}{os.sep}{name}"
        partial = f"{path}{PARTIAL}"
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_LINK | getattr(os, "O_BINARY", 0), PRIVATE)
        try:
            left = memoryview(text)
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        os.rename(partial, path)  # noqa: PTH104

    def _publish(self, replace: bool) -> None:
        if os.path.lexists(self._final):
            if not replace:
                self.discard()
                raise OutputError(f"{self._final} exists and is left as it is: choose another folder, or on_existing: replace")
            shutil.rmtree(self._final)
        os.rename(self._hidden, self._final)  # noqa: PTH104

    def discard(self) -> None:
        """Remove what was written so far."""
        remove(Path(self._hidden))


def partial_name(path: Path) -> Path:
    """Return what a file is called until it is whole."""
    return path.with_name(f"{path.name}{PARTIAL}")


def remove(folder: Path) -> None:
    """Remove a rank's folder, and the step's folder where that is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        pass  # other ranks are there, or it is gone already


_TRAINING = re.compile(r"training\d+")


def training_folder(folder: Path, number: int) -> Path:
    """Return where a further training of a script writes, the first of which writes to a folder. number: from 2 on."""
    return folder / f"training{number}"


def trainings_in(folder: Path) -> list[Path]:
    """Return the folders of further trainings of the script whose run is in a folder: other models, or what came later."""
    if not folder.is_dir() or not (any(folder.glob("rank*")) or any(folder.glob("step*/rank*"))):
        return []
    found = [path for path in folder.glob("training*") if _TRAINING.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def files_of_run(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the files below a folder, but for those of further trainings in it (see `trainings_in`)."""
    others = {path.name for path in trainings_in(folder)}
    return (path for path in folder.rglob(pattern) if path.relative_to(folder).parts[0] not in others)


def find_steps(root: Path) -> dict[int, Path]:
    """Return step number → folder, in order, for the steps under a dump folder."""
    return _numbered(root, _STEP)


def find_ranks(step_folder: Path) -> dict[int, Path]:
    """Return rank → folder, in order, for the ranks under a step's folder.

    mindstudio-probe names the folder of a process that is not distributed after its process, up to 8.1 `rank` alone: such
    folders count from 0.
    """
    numbered = _numbered(step_folder, _RANK) or dict(enumerate(_numbered(step_folder, _PROCESS).values()))
    alone = step_folder / "rank"
    return numbered or ({0: alone} if alone.is_dir() else {})


def holds_dump(folder: Path) -> bool:
    """Tell whether a rank's folder holds a dump, ours or one of kernels."""
    return holds_own_dump(folder) or holds_kernels(folder)


def holds_own_dump(folder: Path) -> bool:
    """Tell whether a rank's folder holds a dump of this package or of mindstudio-probe."""
    return any((folder / name).is_file() for name in (DUMP_FILE, DEBUG_FILE))


def find_dumps(path: Path) -> dict[int, dict[int, Path]]:
    """Return step → rank → folder, in order, of what a user names: a dump's root, a step, a rank, or a dump's file.

    Folders of ranks that hold no dump are among them; steps without a rank are not. Where there is no dump of this package
    or of mindstudio-probe, those of kernels are looked for.
    """
    path = path.parent if path.is_file() else path
    if holds_own_dump(path):
        return {_number(path.parent): {_number(path): path}}
    steps = {number: find_ranks(folder) for number, folder in find_steps(path).items()} or {_number(path): find_ranks(path)}
    steps = {number: ranks for number, ranks in steps.items() if ranks}
    if any(holds_own_dump(folder) for ranks in steps.values() for folder in ranks.values()):
        return steps
    return find_kernels(path) or steps


def _number(folder: Path) -> int:
    """Return the number at the end of a folder's name, 0 where there is none; the number of a process is no rank."""
    digits = re.search(r"(\d+)$", folder.name)
    return int(digits[1]) if digits and not _PROCESS.fullmatch(folder.name) else 0


def log_folder(root: Path, rank: int) -> Path:
    """Return the folder of what a rank writes over the whole run: its record log, findings and metrics."""
    return root / f"rank{rank}"


def find_segments(folder: Path) -> list[Path]:
    """Return the segments of the run log in a rank's folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("metrics-*.parquet") if (match := _SEGMENT.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def next_segment(folder: Path) -> Path:
    """Return where the next segment of the run log in a rank's folder goes."""
    last = find_segments(folder)[-1:]
    number = 1 + max((int(match[1]) for path in last if (match := _SEGMENT.fullmatch(path.name))), default=-1)
    return folder / f"metrics-{number:06d}.parquet"


def has_run_log(folder: Path) -> bool:
    """Tell whether a rank's folder holds a run log."""
    return bool(find_streams(folder) or find_segments(folder))


def find_streams(folder: Path) -> list[Path]:
    """Return the streams in a rank's folder that were not made into a segment, older steps first."""
    return [path for path in (folder / FULL_FILE, folder / LIVE_FILE) if path.is_file()]


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found = {int(m.group(1)): path for path in folder.iterdir() if (m := pattern.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(found.items()))


def existing_of_rank(root: Path, rank: int) -> Iterator[Path]:
    """Yield the folders that hold a dump of this rank, whole or left over from a killed run."""
    for step in find_steps(root).values():
        for name in (f"rank{rank}", f".rank{rank}.partial"):
            if (step / name).is_dir():
                yield step / name
