"""What a planted difference is: edits of the training's files, variables, distributions; and what the first line must say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TRAIN, MODEL, DATA, LOSS, CORPUS = "train.py", "model.py", "data.py", "loss.py", "corpus.txt"


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement in one file; `old` must stand there exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Case:
    """One difference between two runs.

    names: a regular expression that a first line that names the difference matches; empty where nothing may be told.
    base: edits that both sides share. variables, distributions (name → version) and arguments are those of the second run;
    base_variables and base_distributions those of the first. folder: the second run lies in a folder of this name.
    """

    name: str
    group: str
    names: str
    edits: tuple[Edit, ...] = ()
    base: tuple[Edit, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    base_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    distributions: Mapping[str, str] = field(default_factory=dict[str, str])
    base_distributions: Mapping[str, str] = field(default_factory=dict[str, str])
    arguments: tuple[str, ...] = ()
    moved: bool = False


def edit(name: str, group: str, file: str, old: str, new: str, names: str, base: tuple[Edit, ...] = ()) -> Case:
    """Return the case of one edit."""
    return Case(name, group, names, (Edit(file, old, new),), base)


def variable(name: str, value: str, names: str | None = None, base: str | None = None) -> Case:
    """Return the case of one variable that is set on one side, or to another value than `base`."""
    before = {} if base is None else {name: base}
    return Case(
        f"variable {name}", "variables", name if names is None else names, variables={name: value}, base_variables=before
    )


STEADY = (  # the same lines each time, nothing dropped at random
    Edit(DATA, "random.random() >= 0.02", "True"),
    Edit(DATA, "np.random.rand() < 0.1", "index < 0"),
)
