"""The nouns of a comparison: a finding, a check with its table, and the whole with its first line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainprobe.engine.core.words import numbered, spans
from trainprobe.engine.storage.html_page.markup import verdict_for_notebook

Level = Literal["note", "warning", "error"]
Verdict = Literal["pass", "warning", "error"]
LEVELS: tuple[Level, ...] = ("note", "warning", "error")


@dataclass(frozen=True, slots=True)
class PackFinding:
    """One thing that differs, in the words of a person.

    topic: what it is about, so that the same thing seen in two places is said once. explained_by: beginnings of topics; where
    another finding has such a topic, this one follows from it, and is a cause only when there is none. ("",) is any topic.
    suspect: a note that is said as a cause where data, weights or random numbers differ and nothing else explains that.
    """

    level: Level
    text: str
    topic: str
    explained_by: tuple[str, ...] = ()
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """One of the six checks: findings in the order of their weight, and a table of everything that was compared.

    rows: [n][len(columns)]; the last column is the level: pass, note, warning or error.
    """

    name: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]] = ()
    findings: tuple[PackFinding, ...] = ()
    compared: bool = True

    @property
    def verdict(self) -> Verdict:
        """The gravest level of the findings; notes pass."""
        worst = max((LEVELS.index(f.level) for f in self.findings), default=0)
        return "pass" if worst == 0 else LEVELS[worst]  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class PackComparison:
    """Two packs, held against each other. sentence: the first line of every report."""

    bench: str
    cmp: str
    checks: tuple[Check, ...]
    sentence: str
    consequences: str
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 pass, 1 warnings, 2 errors, 3 nothing could be compared."""
        if not any(check.compared for check in self.checks):
            return 3
        return max({"pass": 0, "warning": 1, "error": 2}[check.verdict] for check in self.checks)

    def _repr_html_(self) -> str:
        code = 3 if self.exit_code == 1 else self.exit_code
        return verdict_for_notebook(self.sentence, code, list(filter(None, (self.consequences, *self.notes))))


def which_ranks(differing: Sequence[int], all_ranks: Sequence[int]) -> str:
    """Say which of many ranks differ: nothing for a single rank or all, `rank 17`, `all ranks except 3`."""
    if len(all_ranks) < 2 or set(differing) == set(all_ranks):
        return ""
    rest = sorted(set(all_ranks) - set(differing))
    if len(rest) < len(differing) and len(rest) <= 3:
        return f" on all ranks except {spans(rest)}"
    if len(differing) <= 3 < len(all_ranks):
        return f" on {numbered('rank', differing)} ({numbered('rank', rest)} agree)"
    return f" on {numbered('rank', differing)}"


def shown(value: Any, longest: int = 60) -> str:
    """Return a value as a person writes it: numbers short, texts bare, nothing longer than a line."""
    if isinstance(value, float):
        text = f"{value:.10g}"
        mantissa, _, exponent = text.partition("e")
        text = f"{mantissa}e{int(exponent)}" if exponent else text
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(v) for v in value[:20]) + (", …]" if len(value) > 20 else "]")
    else:
        text = (
            {True: "true", False: "false", None: "none"}.get(value, str(value))
            if isinstance(value, bool | None)
            else str(value)
        )
    return text if len(text) <= longest else text[: longest - 1] + "…"
