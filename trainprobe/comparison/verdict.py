"""The answer of a comparison: an exit code, a sentence, and remarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trainprobe.engine.storage.html_page.markup import verdict_for_notebook

NAMES = ("identical", "equal within rounding", "differ", "not comparable or incomplete")  # of exit codes 0 to 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison comes to. All comparisons use the same exit codes, unless a subclass says otherwise."""

    code: int
    """Exit code: 0 identical, 1 within rounding, 2 differ, 3 not comparable or incomplete."""
    sentence: str
    """The answer in one sentence."""
    details: Sequence[str] = ()
    """Further remarks, in order of weight."""

    colours: ClassVar[tuple[str, str, str, str]] = "green", "cyan", "red", "yellow"
    """Colour of the sentence on a terminal, by exit code."""

    @property
    def page_code(self) -> int:
        """The exit code whose colour the sentence has on a page or in a notebook: 0 and 1 are good, 2 bad, 3 a warning."""
        return self.code

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        return {"code": self.code, "sentence": self.sentence, "details": list(self.details)}

    def _repr_html_(self) -> str:
        return verdict_for_notebook(self.sentence, self.page_code, self.details)
