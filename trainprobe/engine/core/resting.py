"""Which taps take no forward calls for a while, and for whom: the program, or a part of the tool while something else runs."""

from __future__ import annotations

from collections.abc import Iterable

from trainprobe.engine.taps import Tap


class Rests:
    """The taps that are installed. One that several have let rest takes calls again when the last of them has done."""

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
        """Have these of the installed taps rest, or all of them."""
        for tap, resting in self._chosen(taps):
            if not resting:
                tap.pause()
            resting.add(whom)

    def end(self, whom: str, taps: Iterable[Tap | None] | None = None) -> None:
        """Have those of them take calls again that rest for nobody else; nothing is done for whom none rests."""
        for tap, resting in self._chosen(taps):
            if whom in resting:
                resting.remove(whom)
                if not resting:
                    tap.resume()

    def _chosen(self, taps: Iterable[Tap | None] | None) -> list[tuple[Tap, set[str]]]:
        chosen = self._for if taps is None else taps
        return [(tap, self._for[tap]) for tap in chosen if tap is not None and tap in self._for]
