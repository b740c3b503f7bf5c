"""What a scalar is, from what people call it: the loss, the gradient norm, the learning rate, the loss scale."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

Role = Literal["loss", "gradient norm", "learning rate", "loss scale"]

# the first pattern that fits decides: "loss scale" is asked before "loss"
_ROLES: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("loss scale", re.compile(r"(loss|grad)[ _./-]?scal(e|ing)")),
    ("gradient norm", re.compile(r"grad(ient)?s?[ _./-]?norm|\bgnorm\b")),
    ("learning rate", re.compile(r"learning[ _./-]?rate|(^|[ _./-])lr($|[ _./-])")),
    ("loss", re.compile(r"(^|[ _./-])loss($|[ _./-])")),
)
# of another set of samples, or a mean over many steps: it does not go on where the loss of the steps does
_NO_LOSS_OF_A_STEP = re.compile(r"(^|[ _./-])(eval|evaluation|val|valid|validation|test|dev|epoch)($|[ _./-])")


@lru_cache(4096)
def role_of(name: str) -> Role | None:
    """Return what the scalar `name` is, or None. The loss of an evaluation or of a whole epoch is not the loss of a step."""
    lower = name.lower()
    role: Role | None = next((role for role, pattern in _ROLES if pattern.search(lower)), None)
    return None if role == "loss" and _NO_LOSS_OF_A_STEP.search(lower) else role


def scalar(scalars: Mapping[str, float], role: Role) -> float | None:
    """Return the first scalar of a role, or None."""
    return next((value for name, value in scalars.items() if role_of(name) == role), None)
