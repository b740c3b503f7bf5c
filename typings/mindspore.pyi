"""MindSpore is not installed where types are checked; without this file pyright takes `engine/capture/mindspore` for it."""

from typing import Any

def __getattr__(name: str) -> Any: ...
