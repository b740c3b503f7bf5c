"""The compiled part. Recording a training needs it; reading, comparing and judging what was recorded work without."""

from __future__ import annotations

from typing import Any

from trainprobe.errors import ProbeError


class MissingCompiledPart(ProbeError, ImportError):  # noqa: N818  (named for what it says)
    """The package was installed without its compiled part."""

    def __init__(self) -> None:
        super().__init__(
            "recording a training needs the compiled part of trainprobe (trainprobe._native), which was not built when the "
            "package was installed: on Linux x86-64 and aarch64 install the wheel; elsewhere install a C compiler and run "
            "pip install --force-reinstall --no-cache-dir --no-deps trainprobe"
        )


class _AbsentPart:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingCompiledPart


class _Missing:
    """Stands for the compiled part where there is none: whatever is asked of it raises once it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_AbsentPart,), {})


def _load() -> Any | None:
    try:
        from trainprobe import _native  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    except ImportError:
        return None
    return _native  # pyright: ignore[reportUnknownVariableType]


native: Any | None = _load()  # for kernels: other algorithms give the same numbers where it is None
recording: Any = _Missing() if native is None else native  # for all that records


def require() -> None:
    """Raise MissingCompiledPart where there is no compiled part, before anything is opened or written."""
    if native is None:
        raise MissingCompiledPart
