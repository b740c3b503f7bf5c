"""The pieces of logical tensors that this process holds, each with its share in the fingerprint of the whole.

The fingerprint of `engine.stats.checksum` adds up: over pieces that cover a tensor once, whatever way it is cut, the shares
give the fingerprint of the whole tensor. So what some ranks saved can be set against what others loaded, and nobody gathers
a tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

from torch import Tensor

from trainprobe.engine.arrays.torch_checksum import share_of
from trainprobe.engine.arrays.torch_rows import to_host
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.sources import Part
from trainprobe.engine.geometry.shards import SavedShard, Shard, is_cut, mesh_shard


class HeldShards:
    """Every piece of a tensor that is cut, its share still on its device; tensors that are whole are left out.

    defer: takes a small tensor that is to be brought to the host.
    """

    def __init__(self, parts: Iterable[Part], defer: Callable[[Tensor], Deferred]) -> None:
        self._about: list[tuple[tuple[str, str], Shard, Deferred]] = []
        for part in parts:
            shard = part.shard or mesh_shard(part.tensor)
            local = getattr(part.tensor, "_local_tensor", part.tensor)
            if shard is not None and is_cut(shard) and local.numel() == math.prod(shard.shape):
                self._about.append(((part.name, part.slot), shard, defer(share_of(local, shard))))

    def read(self) -> dict[tuple[str, str], SavedShard]:
        """Return (parameter, slot) → piece, of those whose shares have come to the host."""
        return {
            key: SavedShard(_place(shard), math.prod(shard.shape), _whole(shard), int(share.numbers[0]) % (1 << 64))
            for key, shard, share in self._about
            if share.numbers is not None
        }


def shards_of(parts: Iterable[Part]) -> dict[tuple[str, str], SavedShard]:
    """Return (parameter, slot) → piece of every tensor that is cut, now: reads each device once."""
    deferred: list[Deferred] = []

    def defer(share: Tensor) -> Deferred:
        deferred.append(Deferred(share))
        return deferred[-1]

    held = HeldShards(parts, defer)
    for share, numbers in zip(deferred, to_host([share.tensor for share in deferred]), strict=True):
        share.numbers = numbers
    return held.read()


def _whole(shard: Shard) -> int:
    return math.prod(shard.whole) if shard.within is None else _whole(shard.within)


def _place(shard: Shard) -> int:
    text = repr((shard.offset, shard.shape, shard.whole, shard.within and _place(shard.within)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
