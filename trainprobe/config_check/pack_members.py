"""The members of a zip that anybody may have made, as bytes and as JSON; nothing is ever unpacked to disk.

A member whose name would leave the archive, an archive that unpacks to too much, text that is no JSON: each is refused with a
sentence.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from trainprobe.engine.storage.safe_files import regular
from trainprobe.errors import FormatError, UnsafeFile

LARGEST_MEMBER = 256 << 20  # bytes, unpacked
LARGEST_PACK = 2 << 30  # bytes, unpacked
MOST_MEMBERS = 200_000
HIGHEST_RATIO = 200  # unpacked to packed size of a member above 1 MiB; JSON text packs to about a tenth


def read_members(path: Path) -> dict[str, bytes]:
    """Return name → bytes of all files in a zip, within the limits of this module."""
    if path.is_dir():
        raise FormatError(f"{path}: is a folder, and a pack is a zip file")
    try:
        with zipfile.ZipFile(regular(path)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            _refuse_harm(path, entries)
            size = path.stat().st_size
            if any(entry.compress_size > size for entry in entries):
                raise zipfile.BadZipFile("a member says that it is larger than the file")
            return {entry.filename: archive.read(entry) for entry in entries}
    except zipfile.BadZipFile as error:
        raise FormatError(f"{path}: is not a readable zip file ({error}): was it copied in full?") from None
    except (zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FormatError(f"{path}: a member cannot be unpacked ({error}): was it copied in full?") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None


def _refuse_harm(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    if len(entries) > MOST_MEMBERS:
        raise UnsafeFile(f"{path}: holds {len(entries)} members; more than {MOST_MEMBERS} are refused")
    seen: set[str] = set()
    for entry in entries:
        name = entry.filename
        parts = PurePosixPath(name.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or re.match(r"[A-Za-z]:", name) or "\0" in name:
            raise UnsafeFile(f"{path}: the member {name!r} would be written outside its folder; the pack is refused")
        if name in seen:
            raise UnsafeFile(f"{path}: the member {name!r} is there twice; the pack is refused")
        seen.add(name)
        if entry.file_size > LARGEST_MEMBER:
            raise UnsafeFile(f"{path}: {name!r} unpacks to {entry.file_size} bytes; more than {LARGEST_MEMBER} are refused")
        if entry.file_size > 1 << 20 and entry.file_size > HIGHEST_RATIO * max(1, entry.compress_size):
            ratio = entry.file_size // max(1, entry.compress_size)
            raise UnsafeFile(f"{path}: {name!r} unpacks to {ratio} times its size, as a decompression bomb does; it is refused")
    if (total := sum(entry.file_size for entry in entries)) > LARGEST_PACK:
        raise UnsafeFile(f"{path}: unpacks to {total} bytes; more than {LARGEST_PACK} are refused")


def parse_json(path: Path, name: str, raw: bytes) -> Any:
    """Return parsed JSON, or raise FormatError that says where it breaks."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise FormatError(f"{path}: {name!r} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}: {name!r} is not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise FormatError(f"{path}: {name!r} is nested too deeply to be part of a pack") from None
