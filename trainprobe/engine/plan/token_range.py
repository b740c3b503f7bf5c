"""`start(token_range=[first, last])` of the classic front: only these forward passes of a model are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TokenRange:
    """Counts the calls of `model` from 0 on, and calls `resume` before the first of the range and `pause` behind the last.

    model: a torch module; its own call is replaced on the instance until `close`.
    """

    def __init__(self, model: Any, first: int, last: int, resume: Callable[[], None], pause: Callable[[], None]) -> None:
        self._model = model
        calls = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            number, calls = calls, calls + 1
            if number == first:
                resume()
            elif number == last + 1:
                pause()
            return type(model)._call_impl(model, *args, **kwargs)

        model.__dict__["_call_impl"] = call
        if first:
            pause()

    def close(self) -> None:
        """Put the model's own call back. Safe to call twice."""
        self._model.__dict__.pop("_call_impl", None)
