"""Entering hooks on autograd nodes without a handle for each, for the compiled taps (see native/nodes.c).

One registrar stands in torch's place while any tap holds it. A torch that has no such function enters the hooks by its own way.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import function

from trainprobe.compiled import recording
from trainprobe.engine.capture.patching.replaced import Replaced

_OWNER: Any = getattr(function, "_HookMixin", None)
_NAME = "_register_hook"
_holders: set[object] = set()
_replaced: list[Replaced] = []  # the registrar while it stands there


def hold(tap: object) -> None:
    """Have the registrar stand in torch's place for a tap; safe to call twice."""
    if not _holders and _NAME in vars(_OWNER or object):
        _replaced.append(Replaced(_OWNER, _NAME, recording.Registrar()))
    _holders.add(tap)


def let_go(tap: object) -> None:
    """A tap no longer needs it; it is removed when no tap does. Safe to call twice."""
    _holders.discard(tap)
    while _replaced and not _holders:
        _replaced.pop().back()
