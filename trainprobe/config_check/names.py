"""What settings are called in which framework: reads `names.yaml` and answers questions about a name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_SECRET_VALUES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-(?=[\w-]*\d)[\w-]{20,}|\bgh[posu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"
    r"|\bxox[abprs]-[\w-]{10,}|\bA[KS]IA[0-9A-Z]{16}|\bya29\.[\w-]{20,}|\beyJ[\w-]{10,}\.[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
WITHHELD = "(withheld)"


@dataclass(frozen=True, slots=True)
class SettingNames:
    """The tables of `names.yaml`. settings: normalised name → (setting, label). variables: variable → (first name, label)."""

    settings: Mapping[str, tuple[str, str]]
    places: tuple[str, ...]
    by_rank_count: frozenset[str]
    secrets: tuple[str, ...]
    secret_variables: tuple[str, ...]
    variables: Mapping[str, tuple[str, str]]
    variables_of_place: tuple[str, ...]
    speed: frozenset[str]
    random_functions: Mapping[str, str]
    packages: Mapping[str, tuple[str, ...]]

    def setting(self, key: str) -> tuple[str, str] | None:
        """Return (setting, label) of a dotted key: by its whole name, else by ever shorter ends of it."""
        parts = normalised(key).split("_")
        for start in range(len(parts)):
            found = self.settings.get("_".join(parts[start:]))
            if found and (start == 0 or _ends_at_a_dot(key, len(parts) - start)):
                return found
        return None

    def is_place(self, key: str) -> bool:
        """Tell whether a key only says where a run took place."""
        last = normalised(key.rsplit(".", 1)[-1])
        return any(fnmatchcase(last, pattern) for pattern in self.places)

    def follows_rank_count(self, key: str) -> bool:
        """Tell whether a key holds another number where the number of ranks is another."""
        return normalised(key.rsplit(".", 1)[-1]) in self.by_rank_count

    def is_secret(self, key: str) -> bool:
        """Tell whether the value of this key must not be stored."""
        last = normalised(key.rsplit(".", 1)[-1])
        return any(fnmatchcase(last, pattern) for pattern in self.secrets)

    def is_secret_variable(self, name: str) -> bool:
        """Tell whether an environment variable is only named in a pack."""
        return any(fnmatchcase(name.lower(), pattern) for pattern in self.secret_variables)

    def is_variable_of_place(self, name: str) -> bool:
        """Tell whether an environment variable says where, by whom or in which terminal a run was started."""
        return any(fnmatchcase(name, pattern) for pattern in self.variables_of_place)

    def is_speed(self, key: str) -> bool:
        """Tell whether a setting changes how fast data come, and what they hold only where a program's own code makes it so."""
        return normalised(key.rsplit(".", 1)[-1]) in self.speed

    def variable(self, name: str) -> tuple[str, str]:
        """Return the name under which a variable is compared, and its label."""
        return self.variables.get(name, (name, name))

    def package_kind(self, name: str) -> str:
        """Return numeric, platform, tooling or other."""
        plain = re.sub(r"[-_.]+", "-", name).lower()
        kinds = (kind for kind, patterns in self.packages.items() if any(fnmatchcase(plain, p) for p in patterns))
        return next(kinds, "other")


def normalised(key: str) -> str:
    """Return a name as the tables write it: no leading dashes, lower case, one _ for each run of other signs."""
    return re.sub(r"[^a-z0-9]+", "_", key.lstrip("-").lower()).strip("_") or key


def _ends_at_a_dot(key: str, parts: int) -> bool:
    """Tell whether the last `parts` words of a dotted key are whole dotted pieces, so that `my_lr` is not `lr`."""
    pieces = [len(normalised(piece).split("_")) for piece in key.split(".")]
    total = 0
    for words in reversed(pieces):
        total += words
        if total == parts:
            return True
    return False


def masked(key: str, value: Any, names: SettingNames | None = None) -> Any:
    """Return the value without what must not leave the machine: secrets by name, by look, and passwords inside URLs."""
    names = names or load_names()
    if value not in (None, "", False, True) and not isinstance(value, int | float) and names.is_secret(key):
        return WITHHELD
    if isinstance(value, str):
        return WITHHELD if _SECRET_VALUES.search(value) else _USER_IN_URL.sub("***:***", value)
    if isinstance(value, list | tuple):
        return [masked(key, inner, names) for inner in value]
    if isinstance(value, Mapping):
        return {str(k): masked(str(k), inner, names) for k, inner in value.items()}
    return value


@cache
def load_names() -> SettingNames:
    """Read the tables once."""
    tree = yaml.safe_load((Path(__file__).parent / "names.yaml").read_text(encoding="utf-8"))
    settings = {n: (setting, row["label"]) for setting, row in tree["settings"].items() for n in [setting, *row["names"]]}
    variables = {n: (row["names"][0], row["label"]) for row in tree["variables"] for n in row["names"]}
    functions = {n: row[0] for row in tree["random_functions"] for n in row}
    packages = {kind: tuple(patterns) for kind, patterns in tree["packages"].items()}
    return SettingNames(
        settings,
        tuple(tree["places"]),
        frozenset(map(normalised, tree["by_rank_count"])),
        tuple(tree["secrets"]),
        tuple(tree["secret_variables"]),
        variables,
        tuple(tree["variables_of_place"]),
        frozenset(map(normalised, tree["speed"])),
        functions,
        packages,
    )
