"""How a line of the tool reaches people: through the logger `trainprobe`, and on standard error unless that shows it there.

A line is logged with its severity, for handlers that write files, send or format what a program logs. It is printed too,
unless a handler of that logger or one above it writes lines of this severity to standard output or error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

LOGGER = "trainprobe"
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def say(*lines: str, severity: str = "info", write_line: Callable[[str], object] | None = None, **fields: Any) -> None:
    """Log some lines as one record and print them where no handler does. severity: info, warning or error.

    write_line: prints a line, by default to standard error. fields: attributes of the record.
    """
    logger, level = logging.getLogger(LOGGER), LEVELS[severity]
    shown = False
    if logger.hasHandlers() and logger.isEnabledFor(level):
        logger.log(level, "%s", "; ".join(line.strip() for line in lines), extra=fields)
        shown = _is_on_terminal(logger, level)
    if not shown:
        for line in lines:
            (write_line or _to_standard_error)(f"trainprobe: {line}")


def _is_on_terminal(logger: logging.Logger | None, level: int) -> bool:
    """Tell whether a handler of this logger, or of one that it hands records to, prints records of this level."""
    while logger is not None:
        if any(level >= handler.level and _prints(handler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _prints(handler: Any) -> bool:
    """Tell whether a handler writes to standard output or error: itself, through rich, or behind a queue (Python 3.12)."""
    listener = getattr(handler, "listener", None)
    if any(_prints(behind) for behind in getattr(listener, "handlers", ())):
        return True
    stream = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    return stream is not None and any(stream is own for own in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__))


def _to_standard_error(line: str) -> None:
    sys.stderr.write(line + "\n")
