"""What is established of one audited step, for relations to ask by its class.

Each observer returns one frozen dataclass with a default for each field: what is the case where nothing was seen. The class is
here if several relations ask for it. Otherwise it is in the file of its one relation.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Facts:
    """The facts of one step, at most one of each class."""

    def __init__(self, *facts: Any) -> None:
        self._by_class: dict[type, Any] = {type(fact): fact for fact in facts}

    def of(self, kind: type[T]) -> T:
        """Return the fact of a class; one with its defaults where no observer returned any."""
        found = self._by_class.get(kind)
        return kind() if found is None else found
