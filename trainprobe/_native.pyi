"""What the compiled part is made of, as far as Python code names it by its type; the rest of it is used through `Any`."""

from collections.abc import Callable
from typing import Any

class PackedValues:
    """Values of consecutive rows, which are made when they are asked for: `args` and `out` of a Call give a list of them."""

    def to_list(self) -> list[Any]: ...

# Parse a dump as JSON, with tensors of which nothing but numbers is told as Values, and lists of these in the entries of `data`
# as PackedValues; None where Python is to parse it. read: gives so many more bytes of the file. describe: returns the Value
# that a tensor is like, given the text of its type, dtype and shape without the closing brace, or None where that is no tensor.
# loads: parses a text with escapes. entry: returns what is to stand for an entry, given its name and content. Beside the
# document there are a float64 row of Max, Min, Mean and Norm of each tensor, a uint64 checksum of each, and a byte for each
# that says whether it has one.
def read_dump(
    read: Callable[[int], bytes],
    describe: Callable[[bytes], Any],
    loads: Callable[[bytes], Any],
    entry: Callable[[str, Any], Any],
) -> tuple[Any, bytes, bytes, bytes] | None: ...

class ModuleInfo:
    """A module of the model as it is recorded: logical name, class, own parameters, and what is wanted of it."""

    @property
    def name(self) -> str: ...
    @property
    def cls(self) -> str: ...
    @property
    def parameters(self) -> tuple[tuple[str, Any], ...]: ...
    @property
    def flags(self) -> int: ...
    @property
    def selected(self) -> bool: ...
    def __init__(self, name: str, cls: str, parameters: tuple[tuple[str, Any], ...], flags: int, selected: bool) -> None: ...
