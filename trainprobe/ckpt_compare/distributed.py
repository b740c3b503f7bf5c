"""Share the measuring out over the processes of a torchrun world, or over Ray; the result is the same bit for bit.

Every process opens both checkpoints, measures each n-th task, and gets everybody's outcomes back in the order of the tasks. In
a torchrun world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment) they meet in torch.distributed's own store, the
one by which the world itself found together: as JSON, no tensor travels, and nothing of ours listens. Each rank counts
heartbeats up there. Rank 0 watches those of all, the others watch that of rank 0.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from trainprobe.ckpt_compare.tasks import Advance, MeasureTask, Runner, TaskOutcome, perform, run
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.core.ray_cluster import cluster_cores, on_ray
from trainprobe.engine.storage.dumps.tensor_files import load_torch
from trainprobe.errors import CompareError

PATIENCE = 30.0  # seconds without a heartbeat after which a rank is given up
POLL = 0.02  # seconds between two looks for what another rank says
GOODBYE = 1.0  # seconds in which the others can still read why rank 0 gives up
PART = 1 << 20  # bytes of one entry of the store
LONGEST_LINE = 1 << 16  # bytes that one outcome may take
_worlds = itertools.count()


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, number of processes), (0, 1) outside of a torchrun world."""
    return int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))


@contextmanager
def joined(wait: float = PATIENCE) -> Generator[Runner]:
    """Yield what measures this rank's share of tasks and returns the outcomes of all; `run` outside of a torchrun world.

    wait: seconds without a heartbeat after which a rank is given up, however long a rank works that has one. A rank that ends
    the block waits until rank 0 has ended it: torchrun stops all of them when one ends with a code that is not 0.
    The runner raises CompareError where a rank is silent, gives up, or reports what cannot be read.
    """
    rank, size = place()
    if size == 1:
        yield run
        return
    world = _World(rank, size, wait)
    try:
        yield world.run
    except BaseException as error:
        world.give_up(str(error) or type(error).__name__)
        raise
    world.leave()


def run_on_ray(tasks: Sequence[MeasureTask], threads: int | None = None, advance: Advance | None = None) -> list[TaskOutcome]:
    """Measure the tasks on a Ray cluster whose machines see the same paths."""
    count = cluster_cores() * 4
    shares = [tasks[i::count] for i in range(min(count, len(tasks)))]
    done = [*on_ray(_share, shares)]
    if advance is not None:
        advance(sum(t.size for t in tasks))
    return [done[i % len(shares)][i // len(shares)] for i in range(len(tasks))]


def _share(tasks: Sequence[MeasureTask]) -> list[TaskOutcome]:
    return [perform(task) for task in tasks]


@dataclass
class _Silence:
    """Seconds without news, counted while somebody looked: a process that was stopped itself accuses nobody."""

    news: int = 0
    seconds: float = 0.0
    looked: float = field(default_factory=time.monotonic)

    def look(self, news: int, longest: float) -> float:
        """Return the seconds without news. longest: what the time between two looks may count."""
        now = time.monotonic()
        self.seconds = 0.0 if news != self.news else self.seconds + min(now - self.looked, longest)
        self.news, self.looked = news, now
        return self.seconds


class _World:
    """What a rank says to the others and hears of them. One thread talks to the store, which may stop answering.

    Messages are numbered from 0: the outcomes of each batch, then None for a good end, or a text that says why a rank gave up.
    Rank 0 hears all others and answers each batch with everybody's outcomes; the others hear rank 0.
    """

    def __init__(self, rank: int, size: int, wait: float) -> None:
        self._torch = load_torch("a comparison over several processes")
        self._where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self._rank, self._size, self._wait = rank, size, wait
        self._beat = min(1.0, wait / 8)
        others = range(1, size) if rank == 0 else (0,)
        self._silences = {other: _Silence() for other in others}
        self._inbox: dict[int, queue.SimpleQueue[Any]] = {other: queue.SimpleQueue() for other in others}
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._awaited: frozenset[int] = frozenset()
        self._parts = 1  # that a message may have
        self._rounds, self._lost, self._ended, self._wake = 0, "", False, Event()
        self._thread = Thread(target=self._talk, name="ckpt-compare ranks", daemon=True)
        self._thread.start()

    def run(
        self, tasks: Sequence[MeasureTask], threads: int | None = None, advance: Advance | None = None
    ) -> list[TaskOutcome]:
        """Measure this rank's share of the tasks and return the outcomes of all, in the order of the tasks."""
        mine = [_packed(o) for o in run(tasks[self._rank :: self._size], threads, advance)]
        self._parts = 1 + len(tasks) * LONGEST_LINE // PART
        if self._rank:
            self._say(mine)
            every = _counted(self._hear()[0], 0, len(tasks))
        else:
            shares = [mine, *(_counted(share, r, len(tasks[r :: self._size])) for r, share in sorted(self._hear().items()))]
            every = [shares[i % self._size][i // self._size] for i in range(len(tasks))]
        try:
            outcomes = [_unpacked(line) for line in every]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CompareError(f"what another rank sent is no outcome of a comparison: {error!r:.200}") from error
        if not self._rank:
            self._say(every)
        return outcomes

    def leave(self) -> None:
        """End well: rank 0 last, with which the store may end."""
        if self._rank:
            self._say(None)
        with suppress(CompareError):  # everything has been heard
            self._hear()
        if not self._rank:
            self._say(None)
        self._end()

    def give_up(self, why: str) -> None:
        """Tell the others that this rank has no answer, and why."""
        self._say(why)
        self._end()
        if not self._rank:
            time.sleep(GOODBYE)

    def _end(self) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join(self._wait)

    def _say(self, message: Any) -> None:
        self._outbox.put(message)
        self._wake.set()

    def _hear(self) -> dict[int, Any]:
        """Return the next message of each rank that this one hears."""
        heard: dict[int, Any] = {}
        store = _Silence()
        try:
            while missing := self._inbox.keys() - heard.keys():
                self._awaited = frozenset(missing)
                self._wake.set()
                time.sleep(POLL)
                self._look_at(missing, store.look(self._rounds, 2 * self._beat))
                for other in missing:
                    with suppress(queue.Empty):
                        heard[other] = self._inbox[other].get_nowait()
                    if isinstance(heard.get(other), str):
                        raise CompareError(f"rank {other} gave up: {heard[other][:500]}")
        finally:
            self._awaited = frozenset()
        return heard

    def _look_at(self, ranks: Iterable[int], stuck: float) -> None:
        """Raise CompareError where one of the ranks is silent, or the store is, for `stuck` seconds."""
        if self._lost:
            raise CompareError(f"the store of the ranks at {self._where} cannot be reached: {self._lost[:200]}")
        if stuck > 2 * self._wait:  # the ranks are silent before that, where the store answers at all
            raise CompareError(
                f"the store of the ranks at {self._where} was silent for {stuck:.0f} s (--wait {self._wait:g}): "
                "torchrun or rank 0, which keeps it, is stopped"
            )
        for rank in sorted(ranks):
            silence = self._silences[rank]
            if silence.seconds > self._wait and self._inbox[rank].empty():
                known = "was silent" if silence.news else "did not join"
                raise CompareError(
                    f"rank {rank} {known} for {silence.seconds:.0f} s (--wait {self._wait:g}): it has ended or is stopped. "
                    "Nothing is said of the checkpoints; see the output of that rank and start again"
                )

    def _talk(self) -> None:
        """Send, hear and count heartbeats until the end: the one user of the store."""
        try:
            store = self._store()
            sent = 0
            heard = dict.fromkeys(self._inbox, 0)
            due = 0.0
            while not (self._ended and self._outbox.empty()):
                self._wake.clear()
                with suppress(queue.Empty):
                    while True:
                        self._send(store, sent, self._outbox.get_nowait())
                        sent += 1
                if time.monotonic() >= due:
                    store.add(f"{self._rank}/beats", 1)
                    for other, silence in self._silences.items():
                        silence.look(store.add(f"{other}/beats", 0), 2 * self._beat)
                    due = time.monotonic() + self._beat
                for other in self._awaited:
                    if store.check([f"{other}/{heard[other]}"]):
                        self._inbox[other].put(self._received(store, f"{other}/{heard[other]}"))
                        heard[other] += 1
                self._rounds += 1
                self._wake.wait(POLL if self._awaited else self._beat)
        except (RuntimeError, ValueError, OverflowError) as error:  # of torch: the store is not there or ends
            self._lost = str(error) or type(error).__name__

    def _store(self) -> Any:
        """Return the store of the world: that of torchrun where it has one, else one that rank 0 makes as torch does it."""
        dist = self._torch.distributed
        keeps = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, _, port = self._where.rpartition(":")
        wait = timedelta(seconds=self._wait)
        made = dist.TCPStore(address, int(port), self._size, keeps, wait, wait_for_workers=False, multi_tenant=keeps)
        return dist.PrefixStore(f"trainprobe/{next(_worlds)}", made)

    def _send(self, store: Any, number: int, message: Any) -> None:
        text = json.dumps(message).encode()
        parts = [text[i : i + PART] for i in range(0, len(text), PART)]
        key = f"{self._rank}/{number}"
        for i, part in enumerate(parts):
            store.set(f"{key}/{i}", part)
        store.set(key, str(len(parts)))
        if number and isinstance(
            message, list
        ):  # who sends a further batch was answered: a long comparison does not fill the store
            before = f"{self._rank}/{number - 1}"
            for i in range(int(store.get(before))):
                store.delete_key(f"{before}/{i}")

    def _received(self, store: Any, key: str) -> Any:
        """Return a message; one that cannot be read is a text that says so."""
        try:
            number = int(store.get(key))
            if number > self._parts:
                return f"it reported {number} parts of {PART} bytes, where {self._parts} suffice"
            return json.loads(b"".join(store.get(f"{key}/{i}") for i in range(number)))
        except (ValueError, RecursionError) as error:
            return f"it reported what cannot be read: {error}"


def _counted(share: Any, rank: int, count: int) -> list[Any]:
    if not isinstance(share, list) or len(share) != count:
        raise CompareError(f"rank {rank} did not report its {count} outcomes: do all ranks compare the same two checkpoints?")
    return share


def _packed(outcome: TaskOutcome) -> list[Any]:
    return [outcome.row, asdict(outcome.difference), outcome.failure]


def _unpacked(line: list[Any]) -> TaskOutcome:
    row, difference, failure = line
    rest = dict(difference)
    at = rest.pop("at")
    return TaskOutcome(row, Difference(**rest, at=None if at is None else tuple(at)), failure)
