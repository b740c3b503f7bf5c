"""Every file that a command reads, damaged or replaced by what never ends: an answer or one sentence, and never "healthy".

A reader is one row of `READERS`: the small real input that `hostile_material.py` writes, which of its files are damaged, and
the commands that read them. The commands run in processes of their own, within a limit of time and of memory.
`python -m tests.test_hostile_inputs [COUNT]` prints the table of docs/design/hostile_files.md.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.hostile_material import READERS, Reader, write_material

SECONDS, MEMORY = 10, 1 << 30  # that a command may take; bytes more than the process has
ANSWERED, HEALTHY, TRACEBACK, BOMB, HANG = "answered", "healthy", "traceback", "bomb", "hang"
_FINE = re.compile(r"no findings|nothing found|nothing to worry|no NaN and no inf|identical|the same numbers|are the same")
_EXTREME = [b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"-1", b"9" * 30, b"1e999", b"[" * 40, b"../", b"\n", b'"', b"null"]


def damage(data: bytes, chance: random.Random) -> bytes:
    """Damage bytes as disks, networks and ill will do it."""
    at, count, extreme = chance.randrange(max(1, len(data))), chance.choice([1, 2, 4, 8, 60]), chance.choice(_EXTREME)
    numbers = [found.span() for found in re.finditer(rb"\d+", data[:100_000])]
    if numbers and chance.random() < 0.2:
        first, last = chance.choice(numbers)
        return data[:first] + chance.choice([b"-1", b"1000000000000", b"9" * 30, b"1e999", b"null", b'""']) + data[last:]
    return chance.choice([
        data[:at] + bytes(chance.randrange(256) for _ in range(count)) + data[at + count :],
        data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))] if data else []) + data[at + 1 :],
        data[:at] + extreme + data[at + len(extreme) :],
        data[:at] + extreme + data[at:],
        data[:at] + data[at + count :],
        data[:at],
        data[:at] + data[at : at + count] * 2 + data[at + count :],
    ])  # fmt: skip


def damaged(file: Path, chance: random.Random, sealed: Callable[[bytes], bytes]) -> None:
    before = after = file.read_bytes()
    while after == before:
        after = sealed(damage(after, chance))
    file.write_bytes(after)


def fifo(file: Path) -> None:
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def sparse(file: Path) -> None:
    with file.open("wb") as hole:
        hole.truncate(1 << 42)


def folder(file: Path) -> None:
    file.mkdir()


def empty(file: Path) -> None:
    file.touch()


REPLACEMENTS: tuple[Callable[[Path], None], ...] = (fifo, endless, sparse, folder, empty)


def cases(reader: Reader, sound: Path, count: int) -> Iterable[tuple[Path, Callable[[Path], None], int]]:
    """Yield (file inside the material, how to spoil it, which command): `count` damaged files, then every replacement.

    With fewer damaged files than the reader names, each replacement meets one of the commands, and not all of them.
    """
    files = sorted(path.relative_to(sound) for glob in reader.files for path in sound.glob(glob) if path.is_file())
    assert files, reader.name
    for seed in range(count):
        chance = random.Random(f"{reader.name} {seed}")
        sealed = reader.sealed if seed % 2 else bytes
        yield (
            chance.choice(files),
            lambda file, chance=chance, sealed=sealed: damaged(file, chance, sealed),
            seed % len(reader.commands),
        )
    kinds = {re.sub(r"\d+", "0", str(file)): file for file in files}  # one file of each kind
    commands = range(len(reader.commands))
    for i, file in enumerate(kinds.values()):
        for j, replaced in enumerate(REPLACEMENTS):
            for command in commands if count >= reader.mutations else commands[(i + j) % len(commands) :][:1]:
                yield file, lambda file, replaced=replaced: (file.unlink(), replaced(file))[0], command


def answer(
    reader: Reader, sound: Path, place: Path, file: Path, spoil: Callable[[Path], None], command: int
) -> tuple[str, str]:
    """Spoil a copy of the material and run a command on it; return what that was, and what it printed."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(sound, place / "x", symlinks=True)
    spoil(place / "x" / file)
    arguments = [part.format(x=place / "x", sound=sound, out=place / "out") for part in reader.commands[command].split()]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = reader.run(arguments)
        except SystemExit as end:
            code = end.code
    said = f"trainprobe {' '.join(arguments)} → {code}\n{printed.getvalue()}"
    if "MemoryError" in said:
        return BOMB, said
    if "is a fault of trainprobe" in said:
        return TRACEBACK, said
    told = "is not in the log" in said  # a stream that a kill tore looks the same
    claimed = not told and (code in reader.healthy or (reader.healthy and code == 0) or (code == 0 and _FINE.search(said)))
    if reader.judges and claimed and file.name not in reader.harmless and not reader.same(place / "x", sound):
        return HEALTHY, said
    return ANSWERED, said


def work(reader: Reader, sound: Path, place: Path, first: int, count: int, send: Connection) -> None:
    """Answer the cases from the `first` on, each within SECONDS; a signal ends the process, whatever it is doing."""
    warnings.simplefilter("ignore")
    os.setsid()  # what it starts ends with it
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    for number, case in enumerate(cases(reader, sound, count)):
        if number < first:
            continue
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            found = answer(reader, sound, place, *case)
        except BaseException:  # noqa: BLE001  (told by the process that waits)
            found = TRACEBACK, traceback.format_exc()
        signal.setitimer(signal.ITIMER_REAL, 0)
        send.send((number, *found))


def run(reader: Reader, sound: Path, place: Path, count: int | None = None) -> dict[int, tuple[str, str]]:
    """Return what each case of a reader was, and what was printed."""
    count = reader.mutations if count is None else count
    total, found = len(list(cases(reader, sound, count))), {}
    while len(found) < total:
        receive, send = multiprocessing.Pipe(duplex=False)
        told = (reader, sound, place, len(found), count, send)
        worker = multiprocessing.get_context("fork").Process(target=work, args=told)
        worker.start()
        send.close()
        with contextlib.suppress(EOFError):
            while len(found) < total:
                number, *what = receive.recv()
                found[number] = tuple(what)
        worker.join()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        receive.close()
        if len(found) < total:
            file, _, command = list(cases(reader, sound, count))[len(found)]
            kind = HANG if worker.exitcode == -signal.SIGALRM else BOMB
            found[len(found)] = kind, f"{reader.commands[command]} with {file}: exit code {worker.exitcode}"
    return found


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    write_material(root)
    return root


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_the_sound_material_is_read(reader, material, tmp_path):
    """What a reader says of its own input, before that is spoilt: else the damage proves nothing."""
    for command in range(len(reader.commands)):
        file = next(iter(cases(reader, material / reader.material, 1)))[0]
        kind, said = answer(reader, material / reader.material, tmp_path / "place", file, lambda _: None, command)
        code = int(re.search(r"→ (\d+)$", said.splitlines()[0])[1])
        assert kind in (ANSWERED, HEALTHY) and code in reader.sound, said


@pytest.mark.parametrize("part", [pytest.param(5, id="some"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_no_damaged_file_hangs_a_reader_or_is_a_fault_of_the_tool_or_called_healthy(reader, part, material, tmp_path):
    found = run(reader, material / reader.material, tmp_path / "place", reader.mutations // part)
    assert [(number, *what) for number, what in found.items() if what[0] != ANSWERED] == []


def table(count: int | None, names: list[str]) -> None:
    """Print how often which answer was given, a line for each reader; HOSTILE_LOG names a file for what was wrong."""
    with tempfile.TemporaryDirectory() as made, Path(os.environ.get("HOSTILE_LOG", os.devnull)).open("w") as log:
        root = Path(made)
        write_material(root / "material")
        for reader in READERS:
            if names and reader.name not in names:
                continue
            found = run(reader, root / "material" / reader.material, root / "place", count)
            kinds = Counter(kind for kind, _ in found.values())
            print(
                "|", reader.name, "|", len(found), *(f"| {kinds[k]}" for k in (HANG, BOMB, TRACEBACK, HEALTHY)), "|", flush=True
            )
            for number, (kind, said) in found.items():
                if kind != ANSWERED:
                    print(f"=== {reader.name} {number} {kind}\n{said[-3000:]}", file=log, flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU")


if __name__ == "__main__":
    table(int(sys.argv[1]) if len(sys.argv) > 1 else None, sys.argv[2:])
