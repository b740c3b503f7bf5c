"""The fingerprint of a logical tensor: the same in every layout, so that two checkpoints can be compared by two lists.

Defined in engine.stats.checksum: elements are numbered by their place in the whole tensor, so the sums of shards add up to the
sum of the whole. Different number formats give different fingerprints.
"""

from __future__ import annotations

import numpy as np

from trainprobe.ckpt_compare.coverage import coverage_of
from trainprobe.ckpt_compare.pieces import LogicalTensor
from trainprobe.ckpt_compare.tasks import release
from trainprobe.engine.compare.measure import blocks
from trainprobe.engine.stats.checksum import MASK, shard_fingerprint


def tensor_fingerprint(tensor: LogicalTensor) -> int | None:
    """Return the 64-bit fingerprint of a logical tensor, or None when not all of its elements are there."""
    held = coverage_of(tensor)
    if held.uncovered:
        return None
    total = 0
    for part in held.parts:
        bits = part.load()
        for where in blocks(bits.shape):
            block = np.ascontiguousarray(bits[where])
            start = [s.start for s in where] + [0] * (len(bits.shape) - len(where))
            offset = tuple(o + s for o, s in zip(part.box.offset, start, strict=True))
            total += shard_fingerprint(block, offset, tensor.shape)
        release(part.piece.source)
    return total & MASK
