"""Several ranks: rank 0 tests the rows of all as one batch, and the others take their part in each step that all make.

So ranks agree on the verdict, and no collective waits for a rank that found something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from trainprobe.engine.capture.gathering import ranks
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.errors import UsageError
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.subject import APART, as_tested, no_shards
from trainprobe.preflight.training import Training


def together(training: Training | Exception, test: Callable[[Training], int]) -> int:
    """Return what rank 0 answers: `test` of the training of all ranks. Raises UsageError on all where one has none."""
    failed = isinstance(training, Exception)
    own = (fault_text(training), []) if failed else (unfit(training.model), _moved(training.micros, "cpu"))
    every: list[Any] = [None] * ranks()
    dist.all_gather_object(every, own)
    why = next((f"rank {rank}: {fault}" for rank, (fault, _) in enumerate(every) if fault), "")
    forms = {(len(micros), *(path for micro in micros for path in Batch(micro).paths)) for _, micros in every if not why}
    if why or failed or len(forms) > 1:
        if dist.get_rank():
            return 3
        raise UsageError(why or f"ranks have other micro-batches than each other: {sorted(forms)}")
    if dist.get_rank():
        return _follow(training)
    device = next(training.model.parameters()).device
    micros = [_moved(micro, device) for _, held in every for micro in held]
    step = None if training.together is None else partial(_lead, training, device)
    answer = attempt(lambda: test(Training(training.loss, step, training.model, micros)), otherwise=lambda fault: fault)
    _from_first((None, answer if isinstance(answer, int) else 3))
    if isinstance(answer, Exception):
        raise answer
    return answer


def _lead(training: Training, device: Any, _: Any, micros: list[Any]) -> None:
    """Have each rank run its micro-batches; the gradients of this one are then those of the update."""
    count = len(micros) // ranks()
    parts = [_moved(micros[count * rank : count * (rank + 1)], "cpu") for rank in range(ranks())]
    _from_first((parts, 0))
    assert training.together is not None
    training.together(_moved(parts[0], device))


def _follow(training: Training) -> int:
    device = next(training.model.parameters()).device
    while True:
        parts, code = _from_first(None)
        if parts is None:
            return code
        assert training.together is not None
        for p in training.model.parameters():
            p.grad = None
        with as_tested(training.model):
            training.together(_moved(parts[dist.get_rank()], device))


def unfit(model: Any) -> str:
    """Return why rank 0 cannot run a model alone, "" where it can: its weights are shards."""
    megatron: Any = sys.modules.get("megatron.core.parallel_state")
    cut = ranks() > 1 and megatron is not None and megatron.get_tensor_model_parallel_world_size() > 1
    shards = [
        name
        for name, p in model.named_parameters()
        if hasattr(p, "ds_shape") or type(p).__name__ == "FlatParameter" or not p.numel()
        or (cut and getattr(p, "tensor_model_parallel", False))
    ]  # fmt: skip
    return no_shards(model) or (f"{shards[0]} is sharded (FSDP, ZeRO-3 or a tensor-parallel layer): {APART}" if shards else "")


def _from_first(message: Any) -> Any:
    box = [message]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _moved(tree: Any, device: Any) -> Any:
    return tree_map(lambda x: x.detach().to(device) if isinstance(x, Tensor) else x, tree)
