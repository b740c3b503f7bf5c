"""`SingleSave`: keeps the key data of a reinforcement-learning run, from anywhere in the training, without waiting for disk."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from trainprobe.engine.core.findings import Console
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.topology import place_from_environment
from trainprobe.engine.storage.safe_files import open_private, private_folder, write_whole
from trainprobe.errors import OutputError, UsageError, did_you_mean
from trainprobe.rollout.folders import folder_of, held_by_rank, refusal_of_name
from trainprobe.rollout.values import Leaf, leaves_of, statistics_of

FRAMEWORKS = ("pytorch", "mindspore")
MOST_WAITING = 256 << 20  # bytes of copies, on host and devices, that wait to be written; beyond it `save` waits for the disk


class SingleSave:
    """Saves key data under its name: `SingleSave(folder)` once, then `SingleSave.save({"response": response})` anywhere.

    dump_path: the folder (see `trainprobe.rollout.folders`). fmk: "pytorch" or "mindspore". One a process: a second
    construction with the same folder is the same saver. Values are copied when `save` is called (so what the training
    writes over them later does not matter), on the device that they are on, and brought to the host and written by a
    thread. Each value may be a tensor or array of any dtype, a number, a text, or any nesting of lists, tuples and dicts of
    these; a list of texts or of numbers is one array. What cannot be saved is named once on the console and left out; a
    fault of the saver never ends the training.
    Raises UsageError for another framework or for a second folder, OutputError for a folder that holds this rank's data.
    """

    _only: ClassVar[SingleSave | None] = None

    def __new__(cls, dump_path: str | os.PathLike[str], fmk: str = "pytorch") -> SingleSave:
        """Return the process's saver, made at the first construction."""
        if cls._only is not None:
            if Path(dump_path).absolute() != cls._only.folder:
                raise UsageError(
                    f"SingleSave writes to {cls._only.folder} in this process already, not to {dump_path}: "
                    "use one folder, or end the first saver with SingleSave.close()"
                )
            return cls._only
        if fmk not in FRAMEWORKS:
            raise UsageError(
                f"fmk={fmk!r} is not a framework{did_you_mean(fmk, list(FRAMEWORKS))}: use 'pytorch' or 'mindspore'"
            )
        made = super().__new__(cls)
        made._open(Path(dump_path).absolute(), fmk)
        cls._only = made
        return made

    def _open(self, folder: Path, fmk: str) -> None:
        self.folder, self.framework = folder, fmk
        self.rank = place_from_environment().rank
        if held_by_rank(folder, self.rank):
            raise OutputError(
                f"{folder} holds key data of rank {self.rank} from an earlier run: give another folder or remove it"
            )
        private_folder(folder)
        self.number = 0
        self._guard = Guard()
        self._saves = Counter[str]()  # key → how often it was saved in this step
        self._order: dict[str, int] = {}
        self._named: set[str] = set()
        self._console = Console()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainprobe-rollout")
        self._room = threading.Condition()
        self._waiting = 0  # bytes
        atexit.register(SingleSave.close)

    @classmethod
    def save(cls, data: Mapping[str, Any]) -> None:
        """Save values of the current step; each call with the same key is its next micro-batch."""
        self = cls._instance()
        if not isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._leave_out("save", f"expected a dict of names and values, got {type(data).__name__}")
            return
        for key, value in data.items():
            cls.save_ex({key: value}, micro_batch=self._saves[key])
            self._saves[key] += 1

    @classmethod
    def save_ex(cls, data: Mapping[str, Any], micro_batch: int | None = None) -> None:
        """Save values of the current step as micro-batch `micro_batch`, or beside the micro-batches when it is None."""
        self = cls._instance()
        if not isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._leave_out("save_ex", f"expected a dict of names and values, got {type(data).__name__}")
            return
        for key, value in data.items():
            if (refused := refusal_of_name(key)) is not None:
                self._leave_out(str(key), refused)
                continue
            self._guard.run(self._take, key, value, micro_batch)

    @classmethod
    def save_config(cls, data: Any) -> None:
        """Write `data`, anything that JSON holds, to `configurations.json`."""
        self = cls._instance()
        if self.rank == 0:
            self._guard.run(write_whole, self.folder / "configurations.json", json.dumps(data, indent=4, default=str).encode())

    @classmethod
    def step(cls) -> None:
        """End the step: the next values belong to the next one."""
        self = cls._instance()
        self._saves.clear()
        self._order.clear()
        self.number += 1

    @classmethod
    def close(cls) -> None:
        """Write everything and forget the saver; a new one may then be made. Safe to call twice."""
        if cls._only is not None:
            only, cls._only = cls._only, None
            atexit.unregister(SingleSave.close)
            only._pool.shutdown(wait=True)

    @classmethod
    def _instance(cls) -> SingleSave:
        if cls._only is None:
            raise UsageError("no SingleSave exists yet: make one first, SingleSave('folder')")
        return cls._only

    def _take(self, key: str, value: Any, micro: int | None) -> None:
        """Copy a value now and have it written."""
        tree, leaves, refused = leaves_of(value, self.framework)
        for item, why in refused:
            self._leave_out(f"{key}.{item}" if item else key, why)
        order = self._order.setdefault(key, len(self._order))
        folder = folder_of(self.folder, key, self.number, self.rank, micro)
        size = sum(leaf.nbytes for leaf in leaves)
        with self._room:
            self._room.wait_for(lambda: not self._waiting or self._waiting + size <= MOST_WAITING)
            self._waiting += size
        self._pool.submit(self._write_all, folder, key, tree, leaves, order, size)

    def _write_all(self, folder: Path, key: str, tree: Any, leaves: list[Leaf], order: int, size: int) -> None:
        try:
            self._guard.run(_write_leaves, folder, key, tree, leaves, order)
        finally:
            with self._room:
                self._waiting -= size
                self._room.notify_all()

    def _leave_out(self, name: str, why: str) -> None:
        if name not in self._named:
            self._named.add(name)
            self._console.line(f"SingleSave leaves out {name} in step {self.number}: {why}")


def _write_leaves(folder: Path, key: str, tree: Any, leaves: list[Leaf], order: int) -> None:
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for leaf in leaves:
        array = leaf.array()
        path = folder / (f"{key}.{leaf.item}.npy" if leaf.item else f"{key}.npy")
        with open_private(path, "wb") as file:
            np.save(file, array, allow_pickle=False)
        found[leaf.item] = statistics_of(array, leaf.dtype)
    write_whole(folder / f"{key}.json", json.dumps({"data": _filled(tree, found), "order": order}, indent=4).encode())


def _filled(tree: Any, found: Mapping[str, Any]) -> Any:
    """Return the tree of a value with the statistics of each leaf in its place; what was left out is null."""
    if isinstance(tree, list):
        return [_filled(branch, found) for branch in tree]  # pyright: ignore
    if isinstance(tree, dict):
        return {str(name): _filled(branch, found) for name, branch in tree.items()}  # pyright: ignore
    return found.get(tree)
