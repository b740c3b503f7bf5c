"""What a preflight answers: a line for each property, a sentence and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainprobe.comparison.verdict import Verdict

HOLDS, BROKEN, NOT_APPLICABLE, BY_DESIGN, NOT_REACHED = "holds", "BROKEN", "not applicable", "by design", "not reached"
COLOURS = {HOLDS: "green", BROKEN: "bold red", NOT_APPLICABLE: "dim", BY_DESIGN: "cyan", NOT_REACHED: "yellow"}


@dataclass(frozen=True, slots=True)
class Line:
    """What is said of one property."""

    status: str
    """holds, BROKEN, not applicable, by design or not reached."""
    text: str = ""
    """What was seen: the factor and the place, or why nothing could be."""
    figures: dict[str, float] = field(default_factory=dict)
    """The numbers behind the text; distances are relative to the larger of both sides."""
    name: str = ""
    """The property: split, padding, causality, rows, gradient, start, determinism, precision, update, input or overfit."""
    passes: int = 0
    """How often the step was run for it, forward or forward and backward."""

    def __str__(self) -> str:
        return f"{self.name:<12} {self.status}{f': {self.text}' if self.text else ''}"


def _said(status: str) -> Callable[..., Line]:
    return lambda text="", **figures: Line(status, text, figures)


holds, broken, not_applicable, by_design = map(_said, (HOLDS, BROKEN, NOT_APPLICABLE, BY_DESIGN))


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of a preflight. Exit codes: 0 all that was tested holds, 2 something is broken, 3 nothing could be tested."""

    lines: Sequence[Line]
    """One for each property, in the order of their value."""
    passes: int = 0
    """How often the step was run in all."""
    seconds: float = 0.0
    """How long that took."""
    floor: float = 0.0
    """What is rounding: relative distance of two gradients with another order of sums, if it was needed, at least a unit."""

    charts: dict[str, list[list[float]]] = field(default_factory=dict)
    """time, rows → how far outputs (columns) move when inputs (rows) are others, as a share of the largest; where asked for."""

    @property
    def broken(self) -> list[Line]:
        """The properties that do not hold."""
        return [line for line in self.lines if line.status == BROKEN]

    @property
    def verdict(self) -> Verdict:
        """The exit code and the sentence."""
        tested = [line for line in self.lines if line.status in (HOLDS, BROKEN, BY_DESIGN)]
        late = [line.name for line in self.lines if line.status == NOT_REACHED]
        behind = f"; not reached: {', '.join(late)}" if late else ""
        if not tested:
            return Verdict(3, f"no property could be tested{behind}", [str(line) for line in self.lines])
        if bad := self.broken:
            names = ", ".join(line.name for line in bad)
            return Verdict(2, f"broken: {names} ({len(bad)} of {len(tested)} that were tested){behind}", [str(b) for b in bad])
        return Verdict(0, f"nothing is broken of what was tested: {', '.join(line.name for line in tested)}{behind}")

    def as_json(self) -> dict[str, Any]:
        """Return the document that `--json` writes; its schema is docs/preflight.schema.json."""
        told = {"passes": self.passes, "seconds": self.seconds, "floor": self.floor}
        return {"code": self.verdict.code, "sentence": self.verdict.sentence, **told, "properties": [*map(asdict, self.lines)]}

    def __str__(self) -> str:
        return "\n".join([*map(str, self.lines), self.verdict.sentence])

    def _repr_html_(self) -> str:
        return Verdict(self.verdict.code, self.verdict.sentence, [str(line) for line in self.lines])._repr_html_()
