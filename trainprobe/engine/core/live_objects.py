"""The objects of this process that are of given classes, found without touching what other threads are making.

`gc.get_objects()` refers to every object, also to a tuple that another thread is filling. CPython then refuses to resize
that tuple, and that thread, a data loader's for example, fails with a SystemError. `gc.get_referrers()` returns only what
refers to the classes: their instances, and few others.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any


def instances_of(classes: Collection[type]) -> list[Any]:
    """Return the living objects of exactly these classes. `__class__` is not asked: a proxy may answer by an error."""
    kinds = set(map(id, classes))
    return [one for one in gc.get_referrers(*classes) if id(type(one)) in kinds] if kinds else []


def containers_of(objects: Collection[Any]) -> list[list[Any] | dict[Any, Any]]:
    """Return the lists and dicts that hold one of these objects, each once."""
    return [one for one in gc.get_referrers(*objects) if type(one) in (list, dict)] if objects else []


def with_subclasses(base: type) -> list[type]:
    """Return a class and all classes that inherit from it, each once."""
    found = {id(base): base}
    waiting = [base]
    while waiting:
        for cls in type.__subclasses__(waiting.pop()):
            if id(cls) not in found:
                found[id(cls)] = cls
                waiting.append(cls)
    return list(found.values())
