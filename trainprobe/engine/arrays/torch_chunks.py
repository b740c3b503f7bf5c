"""A tensor in pieces, so that temporaries stay small."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

CHUNK = 1 << 18  # elements: a float64 temporary of a chunk is 2 MiB


def chunks(t: Tensor, most: int = CHUNK) -> Iterator[Tensor]:
    """Yield the elements in row-major order as 1-D tensors of at most `most` elements; views where the layout allows."""
    n = t.numel()
    if n <= most:
        yield t.reshape(-1)
    elif t.is_contiguous():
        yield from t.view(-1).split(most)
    elif t.shape[0] == 1:
        yield from chunks(t[0], most)
    else:
        rows = max(1, most // (n // t.shape[0]))
        for start in range(0, t.shape[0], rows):
            yield from chunks(t.narrow(0, start, min(rows, t.shape[0] - start)), most)
