"""Which sources a program runs: its script, the modules of its own, and those in which the classes of its model are written."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trainprobe.config_check.capture.code_hash import code_hashes
from trainprobe.engine.storage.safe_files import LARGEST_TEXT, read_bounded

MOST_BYTES = 1 << 20  # of sources that are parsed; of what is beyond, all bytes are hashed
_INSTALLED = ("/site-packages/", "/dist-packages/")
_DEEPEST = 8  # folders of a package within one another
_OTHERS = frozenset({"trainprobe", "sitecustomize", "usercustomize", "__mp_main__"})
_VERSIONED = frozenset({"torch", "builtins", "typing", "abc", "collections"})  # known by their versions


def source_files(models: list[Any]) -> list[tuple[str, Path]]:
    """Return the name and place of each source that is loaded: the script first, then the model's, then the others by name.

    A source is named by its module (`pkg/data.py`), and the script by its own name.
    """
    loaded: dict[str, Any] = dict(sys.modules)
    script = loaded.pop("__main__", None)
    own = {name: m for name, m in loaded.items() if isinstance(m, ModuleType) and m.__name__ != "__main__" and is_own(m)}
    written = {c.__module__ for model in models for m in model.modules() for c in type(m).__mro__}
    kept = [n for n in sorted(written) if n in sys.modules and n.partition(".")[0] not in (_VERSIONED | _OTHERS)]
    ordered: dict[str, Any] = {**{n: sys.modules[n] for n in kept if n != "__main__"}, **dict(sorted(own.items()))}
    files = [(f"{name.replace('.', '/')}.py", Path(module.__file__)) for name, module in ordered.items() if _file(module)]
    main = Path(script.__file__) if script is not None and is_own(script) else None
    return files if main is None else [(main.name, main), *((n, p) for n, p in files if p != main)]


def is_own(module: Any) -> bool:
    """Tell whether a module is the program's own: neither installed, nor of Python, nor of this tool.

    A module in an installed package is that package's, wherever its file lies: PyTorch's compiler writes to a temporary folder.
    """
    file, package = _file(module), module.__name__.partition(".")[0]
    if not file or package in _OTHERS:
        return False
    if package != module.__name__ and (_file(sys.modules.get(package)) and not is_own(sys.modules[package])):
        return False
    if any(part in file for part in _INSTALLED) or file.startswith(sysconfig.get_path("stdlib") + "/"):
        return False
    return not _holds_distributions(_root(module.__name__, file))


def _root(name: str, file: str) -> str:
    """Return the folder from which a module was imported."""
    levels = name.count(".") + file.endswith("/__init__.py")
    return str(Path(file).parents[levels]) if levels < len(Path(file).parents) else ""


@cache
def _holds_distributions(folder: str) -> bool:
    """Tell whether packages were installed into a folder, such as that of `pip install --target`."""
    try:
        return any(entry.name.endswith(".dist-info") for entry in os.scandir(folder))
    except OSError:
        return False


@cache
def beside_distributions(file: str) -> str:
    """Return a file's path from the folder on that packages were installed into (`pip install --target`); "" for any other."""
    path = Path(file)
    folder = next((p for p in list(path.parents)[:_DEEPEST] if _holds_distributions(str(p))), None)
    return path.relative_to(folder).as_posix() if folder is not None else ""


def _file(module: Any) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else ""


def hash_sources(files: list[tuple[str, Path]]) -> dict[str, dict[str, str]]:
    """Return source → qualified name → hash; what cannot be read is left out."""
    found: dict[str, dict[str, str]] = {}
    room = MOST_BYTES
    for name, path in files:
        try:
            raw = read_bounded(path, LARGEST_TEXT, follow=True)
        except OSError:
            continue
        found[name] = _hashes(raw, room)
        room -= len(raw)
    return found


def _hashes(raw: bytes, room: int) -> dict[str, str]:
    if len(raw) <= room:
        try:
            return code_hashes(raw.decode("utf-8-sig"))
        except (SyntaxError, ValueError, RecursionError):
            pass
    return {"(bytes)": hashlib.sha256(raw).hexdigest()[:16]}
