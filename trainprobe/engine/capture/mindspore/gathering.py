"""The collective of `engine.core.gathering` over MindSpore's communication group of all ranks."""

from __future__ import annotations

import mindspore
import numpy as np

from trainprobe.engine.core.gathering import Gathering, Payload


def gathering() -> Gathering:
    """Return a Gathering over all ranks; alone where communication was not initialised."""
    return Gathering(ranks, _all_gather)


def ranks() -> int:
    """Return how many ranks there are, 1 before communication is initialised."""
    return mindspore.communication.get_group_size() if mindspore.communication.GlobalComm.INITED else 1


def _all_gather(words: Payload) -> list[Payload]:
    """Gather words as int32: MindSpore's own AllGather keeps no more than 32 bits of an int64 on a CPU."""
    gathered = mindspore.ops.AllGather()(mindspore.Tensor(words.view(np.int32)))
    return [np.ascontiguousarray(row).view(np.uint64) for row in gathered.asnumpy().reshape(ranks(), -1)]
