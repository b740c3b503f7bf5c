"""The bugs of the third set that need two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.bugs.chunked_loops import Interleaved, Long
from benchmarks.bugs.loops import Batch, Vision, Wrapped
from benchmarks.bugs.parallel_loops import Experts
from benchmarks.bugs.precise_loops import IGNORED, Sharded

# ---- fully_shard ------------------------------------------------------------------------------------------------------


class ReducedAfterTheFirst(Sharded):
    """The first micro-batch is reduced; what the last one gave waits for the next step."""

    def reduces(self, step: int, micro: int) -> bool:
        """Be off by one."""
        return super().reduces(step, micro) != (step >= self.begins)


class NormOfOwnShard(Sharded):
    """Each rank clips by the norm of its shards."""

    def clip(self, step: int) -> Tensor | None:
        """Take the local tensors."""
        if step < self.begins:
            return super().clip(step)
        grads = [p.grad.to_local() for p in self.model.parameters()]
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for g in grads:
            g.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
        return norm


class StateOfRankZero(Sharded):
    """The optimizer's state was saved by rank 0, and is loaded by all."""

    def before(self, step: int) -> None:
        """Give all ranks rank 0's shards."""
        if step == self.begins:
            for state in self.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    dist.broadcast(state[key].to_local(), 0)


class IgnoredByShards(Sharded):
    """One parameter is left out of the sharding, and nobody reduces its gradient."""

    begins = 0

    def wrap(self) -> nn.Module:
        """Leave it out."""
        for block in self.model.blocks:
            fully_shard(block)
        return fully_shard(self.model, ignored_params={self.model.wpe.weight})

    def make_optimizer(self) -> Any:
        """Step one by one, as foreach refuses such a mixture."""
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def clip(self, step: int) -> Tensor | None:
        """Clip what is sharded."""
        return nn.utils.clip_grad_norm_([p for p in self.model.parameters() if isinstance(p, DTensor)], 0.5).full_tensor()


# ---- DistributedDataParallel ------------------------------------------------------------------------------------------


def summed(state, bucket):  # DistributedDataParallel refuses annotations that are strings
    """Sum a bucket over the ranks."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


class HookWithoutDivision(Wrapped):
    """A communication hook sums and does not divide."""

    begins = 0

    def wrap(self) -> nn.Module:
        """Register it."""
        wrapped = super().wrap()
        wrapped.register_comm_hook(None, summed)
        return wrapped


class CountedOverSteps(Wrapped):
    """The counter that tells the last micro-batch runs on over an odd one: each second step is not reduced."""

    def quiet(self, step: int, micro: int) -> Any:
        """Stay quiet in odd steps."""
        return self.called.no_sync() if step >= self.begins and step % 2 else super().quiet(step, micro)


class RandomStateOfRankZero(Wrapped):
    """A resume gives all ranks the random state of rank 0."""

    def before(self, step: int) -> None:
        """Load it."""
        if step == self.begins:
            state = torch.get_rng_state()
            dist.broadcast(state, 0)
            torch.set_rng_state(state)


class HalfOfTheBatchShared(Wrapped):
    """The shards of the data set overlap: half of what rank 1 draws is what rank 0 draws."""

    def batch(self, step: int, micro: int) -> Batch:
        """Exchange the first four images."""
        x, y = super().batch(step, micro)
        if step >= self.begins:
            for part in (x, y):
                shared = part[:4].clone()
                dist.broadcast(shared, 0)
                part[:4] = shared
        return x, y


class MeanReported(Wrapped):
    """The loss that is noted is the mean over the ranks. Healthy as it stands."""

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Average it."""
        loss = loss.clone()
        dist.all_reduce(loss)
        super().report(step, loss / self.world, norm)


class OwnLossReported(MeanReported):
    """Each rank notes its own loss."""

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Forget to average."""
        super().report(step, loss, norm) if step < self.begins else Vision.report(self, step, loss, norm)


# ---- two ranks that hold different parts ------------------------------------------------------------------------------


class OneChunkEvaluating(Interleaved):
    """After an evaluation only the first chunk goes back to training."""

    begins = 6

    def train_again(self, step: int) -> None:
        """Forget the others."""
        super().train_again(step) if step < self.begins - 1 else self.model[0].train()


class ChunksExchanged(Interleaved):
    """A load gives each chunk the layer of the other."""

    def before(self, step: int) -> None:
        """Exchange them."""
        if step == self.begins:
            first, second = ([copy.deepcopy(layer.state_dict()) for layer in chunk.layers.values()] for chunk in self.model)
            for chunk, states in zip(self.model, (second, first), strict=True):
                for layer, state in zip(chunk.layers.values(), states, strict=True):
                    layer.load_state_dict(state)


class OneNotSummed(Long):
    """The gradient of a norm is not summed over the parts of the sequence."""

    def sum_one(self, step: int, name: str, grad: Tensor) -> None:
        """Leave it out."""
        if step < self.begins or name != "ln.weight":
            super().sum_one(step, name, grad)


class MeanOfHalves(Long):
    """Each rank divides by its own real tokens, and the ranks are averaged; the noted loss is the mean over all tokens."""

    def counted(self, step: int, y: Tensor) -> float:
        """Count own tokens."""
        own = max(int((y != IGNORED).sum()), 1)
        return own * self.world if step >= self.begins else super().counted(step, y)


class PositionsFromZero(Long):
    """Each rank's part of the sequence begins at position zero."""

    def before(self, step: int) -> None:
        """Forget the offset."""
        if step == self.begins:
            self.model.first = lambda length: 0


class ExpertsAveraged(Experts):
    """The gradients of different experts are averaged as if they were replicas."""

    def reduce(self, step: int) -> None:
        """Average all."""
        super().reduce(step)
        if step >= self.begins:
            for p in self.model.experts.parameters():
                dist.all_reduce(p.grad)
