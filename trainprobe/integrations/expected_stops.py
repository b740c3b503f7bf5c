"""Ends a program that was meant to stop with one line in place of a traceback: a rule's action `stop`, or Ctrl-C."""

from __future__ import annotations

import atexit
import sys
import traceback
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from trainprobe.engine.core.log_lines import say
from trainprobe.errors import StopTraining

_interrupts: list[BaseException] = []


def watch() -> None:
    """Print one line for such an end from now on; any other error is shown as before. Exit codes stay what they are."""
    sys.excepthook = partial(_show, sys.excepthook)
    atexit.register(_keep_exit_code)


def _show(otherwise: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sentence = sentence_of(error)
    if type(error) is KeyboardInterrupt:
        _interrupts.append(error)
    if sentence:
        say(sentence, severity="warning")
    else:
        otherwise(kind, error, trace)


def _keep_exit_code() -> None:
    """Let Python end by the signal, as after any Ctrl-C: it forgets that when code is compiled from text at the exit."""
    if _interrupts:
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def sentence_of(error: BaseException) -> str:
    """Return what to say of an error that ends a program as expected, with the line where it was; "" for any other."""
    if isinstance(error, StopTraining):
        return f"{str(error).partition(': ')[0]} stopped the training, as its action `stop` asks"
    if isinstance(error, KeyboardInterrupt):
        frames = traceback.extract_tb(error.__traceback__)
        last = next((f for f in reversed(frames) if "site-packages" not in f.filename and f.line), None)
        return "interrupted (Ctrl-C)" + (f" at {last.filename}:{last.lineno}: {last.line}" if last is not None else "")
    return ""
