"""Entering hooks on autograd nodes without a handle for each, for the compiled taps (see native/registering.c).

One registrar stands in torch's place for all taps that hold it. Where torch has no such function its own way is gone.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import function

from trainprobe.compiled import native
from trainprobe.engine.taps.replaced import Replaced

_OWNER: Any = getattr(function, "_HookMixin", None)
_NAME = "_register_hook"


class _Registrar:
    def __init__(self) -> None:
        self._holders = 0
        self._replaced: Replaced | None = None

    def hold(self) -> None:
        self._holders += 1
        if self._holders == 1 and native is not None and _NAME in vars(_OWNER or object):
            self._replaced = Replaced(_OWNER, _NAME, native.Registrar())

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0 and self._replaced is not None:
            self._replaced.back()
            self._replaced = None


_registrar = _Registrar()


class Hold:
    """A tap's own share in the registrar."""

    def __init__(self) -> None:
        self._held = False

    def take(self) -> None:
        """Have the registrar stand in torch's place; safe to call twice."""
        if not self._held:
            self._held = True
            _registrar.hold()

    def give_back(self) -> None:
        """Let it go; it leaves when nobody holds it. Safe to call twice."""
        if self._held:
            self._held = False
            _registrar.release()
