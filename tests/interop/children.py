"""Runs each program in a child of a process that has imported everything once; a child costs a fifth of a second."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from tests.distributed.ranks import import_late


def search_each_file_once() -> None:
    """Let `inspect` search for the module of a file once: 8.1.1 asks for each frame of each call, 13 ms a search."""
    search, found = inspect.getmodule, {}

    def module_of(thing: Any, file: str | None = None) -> Any:
        if not inspect.isframe(thing):
            return search(thing, file)
        name = thing.f_code.co_filename
        if name not in found:
            found[name] = search(thing, file)
        return found[name]

    inspect.getmodule = module_of


def import_once(module: str) -> None:
    """Import what all children need; mindstudio-probe imports Megatron where it is installed."""
    importlib.import_module(module)
    if module.startswith("msprobe"):
        with contextlib.suppress(ImportError):
            importlib.import_module("megatron.core")
        search_each_file_once()
    import_late()


def in_child(run: Callable[[], None]) -> bool:
    """Run in a child of this process, with all that is done when a program ends; return whether it went well."""
    gc.freeze()
    child = os.fork()
    if child:
        return not os.waitpid(child, 0)[1]
    code = 0
    try:
        run()
    except BaseException:  # noqa: BLE001  (a child must end here)
        traceback.print_exc()
        code = 1
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()  # pyright: ignore
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
