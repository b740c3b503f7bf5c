"""Runs behind a URL (`s3://`, `gs://`, `memory://`, …): what a command reads of them is copied here first, through fsspec.

Only logs, findings, metrics and the JSON of dumps are copied, never tensors. The copy is deleted when the process ends.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from trainprobe.engine.storage.dumps.layout import (
    CONSTRUCT_FILE,
    DEBUG_FILE,
    DUMP_FILE,
    FINDINGS_FILE,
    FULL_FILE,
    LIVE_FILE,
    LOG_FILE,
    STACK_FILE,
    STEPS_FILE,
)
from trainprobe.errors import FormatError, MissingExtra, ProbeError, UnsafeFile

_URL = re.compile(r"([A-Za-z][\w+.-]+)(::[A-Za-z][\w+.-]+)*://")
_READ = (
    LOG_FILE,
    FULL_FILE,
    LIVE_FILE,
    FINDINGS_FILE,
    STEPS_FILE,
    "metrics-*.parquet",
    "*.csv",
    "*tfevents*",
    "*.wandb",
    "trainer_state.json",
)
_READ_OF_DUMPS = (DUMP_FILE, DEBUG_FILE, STACK_FILE, CONSTRUCT_FILE)
_BACKENDS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "oss": "ossfs"}
TRIES = 3  # a file that is gone when it is read was closed meanwhile: the folder is listed again


def as_given(text: str | Path) -> Any:
    """Return an argument that names a run: a path, but a URL as it stands, of which a path would lose a slash."""
    return str(text) if _URL.match(str(text)) else Path(text)


def run_folder(text: str | Path) -> Path:
    """Return the folder or file that an argument of the command line names; of a URL, a copy of what is read of it.

    Raises MissingExtra without fsspec, ProbeError without the backend that the URL needs, FormatError where there is no run.
    """
    if not _URL.match(str(text)):
        return Path(text)
    copy = _open(str(text))
    copy.refresh()
    _copies[copy.folder] = copy
    return copy.folder


def origin(folder: Path) -> str:
    """Return what the user called a folder: the URL of a copy, else its path."""
    return _copies[folder].url if folder in _copies else str(folder)


def is_copy(folder: Path) -> bool:
    """Tell whether a folder is a copy of what a URL names."""
    return folder in _copies


def refresh(folder: Path) -> None:
    """Copy what has changed since, where a folder is a copy."""
    if folder in _copies:
        _copies[folder].refresh()


@dataclass
class _Copy:
    """A URL and its copy. seen: path there → what changes when the file does."""

    url: str
    system: Any
    root: str
    folder: Path
    seen: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])

    def refresh(self) -> None:
        """Bring the copy up to date."""
        with _errors_named(self.url):
            if self.system.isfile(self.root):
                self.system.get_file(self.root, str(self.folder))
                return
            for _ in range(TRIES):
                self.system.invalidate_cache()
                if self._fetch():
                    break
        if not self.seen:
            raise FormatError(
                f"{self.url} holds no run: no metrics-*.parquet, no {LOG_FILE}, no dump (step{{N}}/rank{{R}}/) and no CSV file "
                "of metrics; name the folder that the run was copied to"
            )

    def _fetch(self) -> bool:
        """Copy what is new and delete what is gone; return whether every file was still there when it was read."""
        there: dict[str, dict[str, Any]] = self.system.find(self.root, detail=True)
        needed = {path: info for path, info in there.items() if self._is_read(path)}
        for path in [path for path in self.seen if path not in needed]:
            self._place(path).unlink(missing_ok=True)
            del self.seen[path]
        for path, info in needed.items():
            mark = tuple(info.get(name) for name in ("size", "mtime", "created", "ETag", "LastModified", "updated"))
            if self.seen.get(path) == mark:
                continue
            target = self._place(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.system.get_file(path, str(target))
            except FileNotFoundError:
                return False
            self.seen[path] = mark
        return True

    def _is_read(self, path: str) -> bool:
        relative = self._relative(path)
        if any(part.startswith(".") and part != ".." for part in relative.parts):
            return False
        return relative.name in _READ_OF_DUMPS or any(fnmatch(relative.name, pattern) for pattern in _READ)

    def _relative(self, path: str) -> PurePosixPath:
        return PurePosixPath(path.removeprefix(self.root).lstrip("/"))

    def _place(self, path: str) -> Path:
        relative = self._relative(path)
        if ".." in relative.parts or "\\" in str(relative):
            raise UnsafeFile(f"{self.url} names a file {relative}, which would be copied out of its folder")
        return self.folder.joinpath(*relative.parts)


_copies: dict[Path, _Copy] = {}


def _open(url: str) -> _Copy:
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtra("fsspec", "remote", f"reading {url}") from error
    scheme = url.rpartition("://")[0].rpartition("::")[2]
    try:
        system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _BACKENDS.get(scheme)
        how = f"pip install {package}" if package else " ".join(str(error).split())
        raise ProbeError(f"reading {url} needs fsspec's backend for {scheme}://, which is not installed: {how}") from error
    except ValueError as error:
        known = "fsspec.available_protocols() lists the schemes that there are"
        raise FormatError(f"{url} cannot be read: {error}; {known}") from error
    holder = Path(tempfile.mkdtemp(prefix="trainprobe-"))
    atexit.register(shutil.rmtree, holder, ignore_errors=True)
    name = PurePosixPath(root).name or "run"
    with _errors_named(url):
        whole = system.isfile(root)
    if not whole:
        (holder / name).mkdir()
    return _Copy(url, system, root.rstrip("/"), holder / name)


@contextmanager
def _errors_named(url: str) -> Generator[None, None, None]:
    """Turn what a backend raises into a sentence that names the URL: each has errors of its own."""
    try:
        yield
    except FileNotFoundError as error:
        raise FormatError(f"{url} does not exist, or nobody may list it") from error
    except Exception as error:
        if not isinstance(error, ProbeError):
            raise FormatError(f"{url} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}") from error
        raise
