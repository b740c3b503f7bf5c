"""Which taps are paused, and by whom: the program, or a part of the tool while something else runs."""

from __future__ import annotations

from collections.abc import Iterable

from trainprobe.engine.capture import Tap


class Pauses:
    """The installed taps. One that several parties have paused takes calls again when the last of them resumes it."""

    def __init__(self) -> None:
        self._for: dict[Tap, set[str]] = {}

    def install(self, taps: Iterable[Tap]) -> None:
        """Learn of the taps that take calls from now on."""
        self._for = {tap: set() for tap in taps}

    def clear(self) -> None:
        """Forget all: the step is over."""
        self._for.clear()

    def drop(self, tap: Tap) -> None:
        """Forget a tap that takes no calls any more."""
        self._for.pop(tap, None)

    def begin(self, whom: str, taps: Iterable[Tap | None] | None = None) -> None:
        """Pause these of the installed taps, or all of them."""
        for tap, paused_by in self._chosen(taps):
            if not paused_by:
                tap.pause()
            paused_by.add(whom)

    def end(self, whom: str, taps: Iterable[Tap | None] | None = None) -> None:
        """Resume those of them that no one else has paused; does nothing for a caller that paused none."""
        for tap, paused_by in self._chosen(taps):
            if whom in paused_by:
                paused_by.remove(whom)
                if not paused_by:
                    tap.resume()

    def _chosen(self, taps: Iterable[Tap | None] | None) -> list[tuple[Tap, set[str]]]:
        chosen = self._for if taps is None else taps
        return [(tap, self._for[tap]) for tap in chosen if tap is not None and tap in self._for]
