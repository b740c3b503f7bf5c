"""Every error this package raises on purpose, in one tree.

    ProbeError
    ├── PlanError            a plan that cannot be carried out: unknown key, wrong type, empty selection
    ├── MissingExtra         an optional library is not installed; the message holds the `pip install`
    ├── OutputError          a folder or file that cannot be written, or would be overwritten
    ├── FormatError          a file that cannot be read as what it claims to be
    │   └── UnsafeFile       a file refused because reading it would run code or leave its folder
    ├── CompareError         two things that cannot be compared at all
    ├── UsageError           a verb called in the wrong order or with a value that has no meaning
    └── StopTraining         raised by a rule whose action is "stop", through the integration

Each message says what happened, the value, where it was, and what to do.
"""

from __future__ import annotations


class ProbeError(Exception):
    """Base of all errors raised on purpose."""


class PlanError(ProbeError, ValueError):
    """A plan that cannot be carried out."""


class MissingExtra(ProbeError, ImportError):  # noqa: N818  (named for what it says)
    """An optional library that is not installed."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library}, which is not installed: pip install 'trainprobe[{extra}]'")
        self.library = library
        self.extra = extra


class OutputError(ProbeError, OSError):
    """A folder or file that cannot be written, or would be overwritten."""


class FormatError(ProbeError, ValueError):
    """A file that cannot be read as what it claims to be."""


class UnsafeFile(FormatError):  # noqa: N818  (named for what it says)
    """A file refused because reading it would run code or leave its folder."""


class CompareError(ProbeError, ValueError):
    """Two things that cannot be compared at all."""


class UsageError(ProbeError, RuntimeError):
    """A verb called in the wrong order or with a value that has no meaning."""


class StopTraining(ProbeError):  # noqa: N818  (it is a request, named as in Lightning and Keras)
    """A rule with the action "stop" fired; the integration ends the training."""


def did_you_mean(name: str, known: list[str]) -> str:
    """Return ` — did you mean 'x'?` for the nearest of `known`, or an empty string."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" — did you mean {near[0]!r}?" if near else ""
