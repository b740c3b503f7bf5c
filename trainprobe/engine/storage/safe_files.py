"""How files are opened: those with names that others can predict are written whole or not at all, and never through a link;
what is read is a regular file, and no more of it than it may hold.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainprobe.errors import FormatError, OutputError

if TYPE_CHECKING:
    import sqlite3

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # opening fails where the name is a link
PRIVATE = 0o600  # who may read what is written; `chmod -R g+rX FOLDER` shares it
SMALL = 64 << 10  # bytes of a file that people write by hand
LARGEST_TEXT = 1 << 26  # bytes of a file of settings, names or rules
LONGEST_LINE = 1 << 26  # bytes of a line of a log
MOST_VALUES = 100_000  # of a YAML text, once its anchors are expanded
LARGEST_STATE = 1 << 30  # bytes of a file that remembers a run


def private_folder(folder: Path) -> None:
    """Make a folder that this user alone may enter, unless it is there. Raises OSError."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(0o700, exist_ok=True)


def open_private(path: Path, mode: str, **options: Any) -> Any:
    """Open a file to write it, which only this user may read: it may hold prompts, weights and settings. Raises OSError."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | NO_LINK, PRIVATE), **options)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is the old one or the new one at any time. Its folder must exist. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | getattr(os, "O_BINARY", 0), PRIVATE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        if error.errno not in (errno.EXDEV, errno.EBUSY):
            raise
        _write_over(path, data)  # a file that is mounted by itself: no rename reaches it
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def page_database(path: Path, ending: str, option: str) -> Generator[sqlite3.Connection]:
    """Give a database for a page of mindstudio-probe; the file is there, whole, once the block has ended without an error.

    ending: of names that the page opens. option: what the user changes where it cannot be written. Raises OutputError.
    """
    import sqlite3  # no training needs it

    if not path.name.endswith(ending):
        raise OutputError(f"the page opens names that end with {ending} alone: {option} {path}{ending}")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(draft)) as database, database:
            yield database
        draft.chmod(0o640)  # the page refuses files that others may write
        draft.replace(path)
    except (OSError, sqlite3.Error) as error:
        raise OutputError(f"cannot write {path}: {error}; choose another place with {option}") from error
    finally:
        draft.unlink(missing_ok=True)


def _write_over(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_LINK | getattr(os, "O_BINARY", 0), PRIVATE)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def regular(path: Path) -> Path:
    """Return the path of a regular file, for readers that open it themselves. Raises OSError; FormatError for anything else.

    A pipe would be waited for, and a device may have no end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise FormatError(f"{path} is no regular file")
    return path


def open_to_read(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading. Raises what `regular` raises. follow: a link may stand there."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags | (0 if follow else NO_LINK))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FormatError(f"{path} is no regular file")
    return os.fdopen(handle, "rb")


def read_bounded(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Return what a regular file holds. Raises OSError; FormatError for what is no such file or has more than `most` bytes."""
    with open_to_read(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise FormatError(f"{path} has {size} bytes, and more than {most} are not read")
        return file.read(size)  # not `most`: that much room would be made


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """Return the text of a file that people or tools write by hand. Raises OSError; FormatError as above, or for no UTF-8."""
    try:
        return read_bounded(path, most, follow=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text (byte {error.start})") from None


def lines_of(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of an open file. Raises FormatError for one that has no end."""
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise FormatError(f"{path} has a line of more than {LONGEST_LINE} bytes: it is damaged")
        yield line


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text in UTF-8, as the csv module wants them. Raises OSError; FormatError as above."""
    with open_to_read(path) as file:
        for number, line in enumerate(lines_of(file, path), 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise FormatError(f"{path}, line {number}, is not UTF-8 text") from None


def yaml_documents(text: str, loader: Any = None, most: int = MOST_VALUES) -> list[Any]:
    """Return the documents of a YAML text. What anchors and merge keys expand to is counted before anything is expanded.

    loader: a class of PyYAML; by default its safe one. Raises yaml.YAMLError, ValueError, RecursionError; FormatError for more
    than `most` values.
    """
    import yaml

    reader, found = (loader or yaml.SafeLoader)(text), list[Any]()
    try:
        while reader.check_node():
            node = reader.get_node()
            if _expanded(node, most, {}) > most:
                raise FormatError(f"its anchors expand to more than {most} values: write them out")
            found.append(reader.construct_document(node))
    finally:
        reader.dispose()
    return found


def _expanded(node: Any, most: int, known: dict[int, int]) -> int:
    """Return how many values a node of YAML stands for; one that holds itself stands for too many."""
    if id(node) not in known:
        known[id(node)] = most + 1
        inside = node.value if isinstance(node.value, list) else ()
        pairs = (part for entry in inside for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[id(node)] = 1 + sum(_expanded(part, most, known) for part in pairs)
    return known[id(node)]


def parse_yaml(text: str, where: str) -> Any:
    """Return the one document of a YAML (or JSON) text, None for an empty one. Raises FormatError that begins with `where`."""
    import yaml

    try:
        found = yaml_documents(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FormatError(f"{where} is no YAML: {' '.join(str(error).split())[:300]}") from None
    if len(found) > 1:
        raise FormatError(f"{where} holds {len(found)} documents of YAML, and one is expected")
    return found[0] if found else None


def load_yaml(path: Path, purpose: str = "") -> Any:
    """Return what `parse_yaml` returns of a file; also its OSError is a FormatError. purpose: such as "--names ", for these."""
    try:
        text = read_text(path)
    except OSError as error:
        raise FormatError(f"{purpose}{path}: {error.strerror or error}; name a YAML file") from None
    except FormatError as error:
        raise FormatError(f"{purpose}{error}") from None
    return parse_yaml(text, f"{purpose}{path}")


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be used to `NAME.damaged`, or a name with a number behind it; return the new name."""
    target, number = path.with_name(f"{path.name}.damaged"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.damaged{number}")
    return path.rename(target)
