"""Names of entries, taken apart: what `entry_name` in engine.core.step_data puts together, and what other tools write."""

from __future__ import annotations

import re
import sys

from trainprobe.engine.core.records import Call

NOT_READ = "has no form that is known and was left out"  # ends a note of a step of which an entry was not read
_MODULE = re.compile(r"(?:Module|Cell)\.(.+)\.([^.]+)\.(forward|backward)\.(\d{1,9})")
_GRADIENTS = re.compile(r"(?:Module|Cell)\.(.+)\.([^.]+)\.parameters_grad(?:\.(\d{1,9}))?")
_SAVED = re.compile(r"(.+?)(_grad)?\.(\d{1,9})\.debug")
_MOST_DIGITS = 9  # of the number of a call
_COLLECTIVES = ("Distributed.", "MintDistributed.")


def parse_entry(name: str) -> Call | None:
    """Return an empty call with the name, class, number and phase of an entry, or None when the name has no known form.

    Older files number neither the gradients of parameters nor distinguish collectives: these are 0, and known by their prefix.
    """
    before, _, last = name.rpartition(".")
    if last in ("forward", "backward"):
        op, _, number = before.rpartition(".")
        if op and len(number) <= _MOST_DIGITS and number.isdecimal() and "\n" not in op:
            kind = "collective" if name.startswith(_COLLECTIVES) else "op"
            return Call(kind, sys.intern(op), int(number), "backward" if last == "backward" else "forward")
    elif last == "debug":
        if m := _SAVED.fullmatch(name):
            return Call("saved", m[1], int(m[3]), "backward" if m[2] else "forward")
    elif m := _MODULE.fullmatch(name):
        return Call("module", m[1], int(m[4]), "backward" if m[3] == "backward" else "forward", cls=m[2])
    elif m := _GRADIENTS.fullmatch(name):
        return Call("parameter", m[1], int(m[3] or 0), "backward", cls=m[2])
    return None
