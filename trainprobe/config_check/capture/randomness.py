"""Every random call in Python, NumPy and torch with its stack and count, and the generators' states.

Functions are replaced while a run is captured. A call made by another recorded call is part of that one. Reading a state
never changes it.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainprobe.config_check.capture.on_import import ImportWatch
from trainprobe.config_check.capture.patches import Patches, after
from trainprobe.config_check.capture.plain_values import plain
from trainprobe.config_check.capture.random_functions import Describe, random_functions
from trainprobe.config_check.capture.sources import beside_distributions
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.stacks import Stacks

COMPILED = "the program compiles: random calls were counted until it first did, their generators' states throughout"
SETUP = -1  # the window before the first micro-step

_LINE = re.compile(r"File (.*), line (\d+), in (.*?), \n (.*)", re.S)
_OWN = str(Path(__file__).parent)
_PACKAGE = re.compile(r".*/(?:site-packages|dist-packages|lib/python[\d.]+)/")


class RandomCalls:
    """Counts calls by function, detail, window and stack."""

    def __init__(self, patches: Patches, guard: Guard) -> None:
        self.active = False
        self.sealed: set[str] = set()  # types whose methods this interpreter does not let be replaced
        self.ended = ""  # why calls were no longer counted, where that was before the end
        self.window = SETUP
        self.ended_in: int | None = None  # the window in which that was
        self.on_compiled: Callable[[Any, Any, str], None] = lambda target, compiled, arguments: None
        self.beside: list[tuple[Any, str, Callable[[Any], Any]]] = []  # owner, name, wrapper: replaced while calls are counted
        self._patches = patches
        self._guard = guard
        self._stacks = Stacks()
        self._counts: dict[tuple[str, str, int, int], int] = {}
        self._nested = threading.local()
        self._compiler: Any = None
        self._imports = ImportWatch()

    def install(self) -> None:
        """Replace the random functions."""
        torch.overrides.get_overridable_functions()  # a list that torch makes once, of the originals
        self.active = True
        for full, owner, name, describe in random_functions():
            if not self._patches.replace(owner, name, functools.partial(self._wrapper, full, describe)):
                self.sealed.add(full.rpartition(".")[0])
        for owner, name, wrap in self.beside:
            self._patches.replace(owner, name, wrap)
        self._patches.replace(torch.jit, "script", self._scripting)
        self._patches.replace(torch, "compile", after(self._see_compiled))
        self._patches.spread()
        if "torch._dynamo" in sys.modules:
            self._watch_compiler()
        else:
            self._imports.wait_for("torch._dynamo", lambda dynamo: self.install(), before=self._pause)

    def _wrapper(self, full: str, describe: Describe, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self.active or getattr(self._nested, "deep", False):
                return original(*args, **kwargs)
            if not self._guard.run(self._count, full, describe, args, kwargs):
                return original(*args, **kwargs)
            self._nested.deep = True
            try:
                return original(*args, **kwargs)
            finally:
                self._nested.deep = False

        return call

    def stop(self, *, forget_compiler: bool = True) -> None:
        """Put all functions back; what was counted stays."""
        self._pause()
        self._imports.stop()
        if self._compiler is not None and forget_compiler:
            if self._compilation_begins in self._compiler.start_callbacks:
                self._compiler.remove_start_callback(self._compilation_begins)
            self._compiler = None

    def end(self, why: str) -> None:
        """Say why calls are no longer counted from now on; the first reason stays."""
        if self.ended_in is None:
            self.ended, self.ended_in = why, self.window

    def _see_compiled(self, compiled: Any, /, *args: Any, **kwargs: Any) -> None:
        """Libraries call torch.compile long before anything is compiled; what it returns is made known."""
        if self.active and args:
            self.on_compiled(args[0], compiled, _words(kwargs))

    def _watch_compiler(self) -> None:
        """Ask the compiler to say when it first compiles: it knows functions by identity, and shall see the originals only."""
        handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None and self._compiler is None:
            self._compiler = handler
            handler.register_start_callback(self._compilation_begins)
            self._patches.replace(sys.modules["torch._dynamo"], "reset", after(self._watch_again))

    def _pause(self) -> None:
        """Put the originals back; the compiler lists them all as it is imported."""
        self.active = False
        replaced = self._patches.wrappers
        self._patches.undo()
        _forget_in_compiler(replaced)

    def _compilation_begins(self, *about: Any) -> None:
        if self.active or len(self._patches):
            self.end(COMPILED)
            self.stop(forget_compiler=False)

    def _watch_again(self, *_: Any, **__: Any) -> None:
        """`torch._dynamo.reset` forgets who wants to be told of compilations."""
        if self.active and self._compiler is not None and self._compilation_begins not in self._compiler.start_callbacks:
            self._compiler.register_start_callback(self._compilation_begins)

    def _scripting(self, original: Any) -> Any:
        """TorchScript knows functions by identity: it compiles with the originals in place."""

        @functools.wraps(original)
        def script(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            self.stop(forget_compiler=False)
            try:
                return original(*args, **kwargs)
            finally:
                self.install()

        return script

    def _count(self, full: str, describe: Describe, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Count a call, and tell whether it draws numbers at all."""
        detail = describe(args, kwargs)
        if detail is None:
            return False
        key = (full, detail, self.window, self._stacks.capture(-1, 0, 4))
        self._counts[key] = self._counts.get(key, 0) + 1
        return True

    def content(self) -> dict[str, Any]:
        """Return {"calls": [function, detail, window, count, stack], "stacks": [[frame, …], …], "counted_until"}.

        Frames are innermost first. counted_until: the window in which counting ended early, None where it did not.
        Names of temporary files are left out: `tempfile` draws them from a generator that nobody else uses.
        """
        stacks = [[_frame(line) for line in lines if _OWN not in line] for lines in self._stacks.text()]
        calls = [
            {"function": function, "detail": detail, "window": window, "count": count, "stack": stack}
            for (function, detail, window, stack), count in list(self._counts.items())
            if stack < 0 or not _names_a_file(stacks[stack])
        ]
        return {"calls": calls, "stacks": stacks, "counted_until": self.ended_in}


def _forget_in_compiler(wrappers: list[Any]) -> None:
    """Have the compiler list torch's functions anew if it did so while wrappers stood in their place.

    It lists them as it is imported, and again after `init_process_group`, when `torch.compile` is next called.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    listing: Any = getattr(rules, "get_torch_obj_rule_map", None)
    if listing is None or not listing.cache_info().currsize:
        return
    listed = listing()
    if any(wrapper in listed for wrapper in wrappers):
        rules.clear_lru_cache()


def _words(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of torch.compile that were given, without what is compiled."""
    return ", ".join(f"{k}={plain(v)}" for k, v in sorted(arguments.items()) if v is not None and k != "model")


def _names_a_file(stack: list[dict[str, Any]]) -> bool:
    return next((frame["file"] for frame in stack if frame["file"] != "random.py"), "") == "tempfile.py"


def _frame(line: str) -> dict[str, Any]:
    """Take a frame apart; the file is named from its package on, or by its last two parts, so that machines agree."""
    match = _LINE.fullmatch(line)
    if match is None:
        return {"file": "", "line": 0, "function": "", "source": line}
    path = match[1].replace("\\", "/")
    distribution = "" if _PACKAGE.match(path) or path.startswith("<") else beside_distributions(path)
    installed = bool(_PACKAGE.match(path) or path.startswith("<") or distribution)
    short = distribution or (_PACKAGE.sub("", path) if installed else "/".join(Path(path).parts[-2:]))
    return {"file": short, "line": int(match[2]), "function": match[3], "source": match[4].strip(), "installed": installed}


def random_states() -> dict[str, str]:
    """Return generator → hash of its state, 16 hexadecimal digits; draws nothing."""
    numpy_state: Any = np.random.get_state(legacy=False)
    states = {
        "python": _hash(repr(random.getstate()).encode()),
        "numpy": _hash(
            repr((numpy_state["bit_generator"], numpy_state["state"]["pos"])).encode() + numpy_state["state"]["key"].tobytes()
        )
        if numpy_state.get("bit_generator") == "MT19937"
        else _hash(repr(numpy_state).encode()),
        "torch": _hash(torch.get_rng_state().numpy().tobytes()),
    }
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            states[f"cuda:{index}"] = _hash(torch.cuda.get_rng_state(index).numpy().tobytes())
    megatron: Any = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker = getattr(megatron, "_CUDA_RNG_STATE_TRACKER", None)
    for name, state in getattr(tracker, "states_", {}).items():
        if isinstance(state, torch.Tensor):
            states[f"megatron:{name}"] = _hash(state.cpu().numpy().tobytes())
    return states


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]
