"""NumPy's own files, mapped into memory."""

from __future__ import annotations

import tokenize
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.storage.safe_files import regular
from trainprobe.errors import FormatError

# what NumPy raises for a header that is damaged, in addition to the errors that it documents
_DAMAGED = (OSError, ValueError, EOFError, SyntaxError, tokenize.TokenError, TypeError, KeyError, OverflowError, MemoryError)


def map_npy(path: Path) -> npt.NDArray[Any]:
    """Return the array in an .npy file, mapped. Raises FormatError where it cannot be read, or would need pickle."""
    try:
        array = np.load(regular(path), mmap_mode="r", allow_pickle=False)
    except (*_DAMAGED, RecursionError) as error:
        raise FormatError(f"{path} cannot be read as a NumPy file: {str(error)[:300]}") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise FormatError(f"{path} is an archive of several arrays, not one tensor")
    return array
