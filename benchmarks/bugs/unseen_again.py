"""A second set of bugs, written and judged once after the detectors had been changed for the first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.bugs.loops import Averaged, Batch, ByHand, Recurrent, Vision, Wrapped, images
from benchmarks.bugs.parallel_loops import Experts, Pipeline, Split
from benchmarks.bugs.published import Bug, at
from benchmarks.bugs.unseen import Pair, bug


class Epochs(Wrapped):
    """The convolutions on epochs of a data set that a DistributedSampler shuffles anew. Healthy as it stands."""

    begins, micro = 4, 1

    def build(self) -> nn.Module:
        """Make the data too."""
        self.set = TensorDataset(*images(torch.Generator().manual_seed(3), 64))
        self.sampler = DistributedSampler(self.set, self.world, self.rank, seed=self.seed)
        self.left: list[Batch] = []
        self.epoch = 0
        return super().build()

    def batch(self, step: int, micro: int) -> Batch:
        """Take the next batch; four are an epoch."""
        if not self.left:
            self.tell_epoch()
            self.left = [(x, y) for x, y in DataLoader(self.set, batch_size=8, sampler=self.sampler)]
            self.epoch += 1
        return self.left.pop(0)

    def tell_epoch(self) -> None:
        """Shuffle anew."""
        self.sampler.set_epoch(self.epoch)


class EpochNotTold(Epochs):
    """set_epoch is not called: each epoch has the order of the first."""

    def tell_epoch(self) -> None:
        """Forget it."""


class OneLayerEvaluating(Vision):
    """A batch normalisation is put into evaluation mode and stays there."""

    def before(self, step: int) -> None:
        """Each step, as a callback that freezes the wrong layer does."""
        if step >= self.begins:
            self.model[1][1].eval()


class GradientMasked(Averaged):
    """A hook that was left behind zeroes the gradient of one weight."""

    def before(self, step: int) -> None:
        """Leave it behind."""
        if step == self.begins:
            self.model.blocks[1].linear1.weight.register_hook(torch.zeros_like)


class ScaleNotRenewed(Recurrent):
    """The scale has grown to infinity, and scaler.update is not called: every update is skipped from now on."""

    def before(self, step: int) -> None:
        """Raise it."""
        if step == self.begins:
            self.scaler._scale = torch.tensor(float("inf"))

    def update(self, step: int) -> None:
        """Leave update out; what unscale_ remembers is forgotten by hand."""
        self.scaler.step(self.optimizer)
        if step < self.begins:
            self.scaler.update()
        else:
            self.scaler._per_optimizer_states.clear()


class LaggingRank(ByHand):
    """One rank trains on what the other trained on a step ago."""

    begins = 4

    def batch(self, step: int, micro: int) -> Batch:
        """Draw from the other's stream, one step behind."""
        if step == self.begins and self.rank == 1:
            self.data.manual_seed(100 + 1000 * self.seed)
            for _ in range(step - 1):
                super().batch(step, micro)
        return super().batch(step, micro)


class ReplicasInTheNorm(Split):
    """Squares of replicated gradients enter the norm once a rank."""

    def clip(self, step: int) -> Tensor | None:
        """Sum everything over the ranks."""
        if step < self.begins:
            return super().clip(step)
        total = torch.stack([p.grad.square().sum() for p in self.model.parameters()]).sum()
        dist.all_reduce(total)
        for p in self.model.parameters():
            p.grad.mul_(torch.clamp(0.5 / (total.sqrt() + 1e-6), max=1.0))
        return total.sqrt()


class ShardsExchanged(Split):
    """A load gives each rank the other's shard."""

    def before(self, step: int) -> None:
        """Exchange one."""
        if step == self.begins:
            up = self.model.blocks[1].up.data
            parts = [torch.empty_like(up) for _ in range(self.world)]
            dist.all_gather(parts, up)
            up.copy_(parts[1 - self.rank])


class TieSummedTwice(Pipeline):
    """The tied gradient is summed after each micro-batch, so that the first counts twice a stage."""

    def first(self, x: Tensor) -> Tensor:
        """Sum early."""
        out = super().first(x)
        self.early()
        return out

    def second(self, step: int, y: Tensor) -> Tensor:
        """Sum early."""
        out = super().second(step, y)
        self.early()
        return out

    def early(self) -> None:
        """Sum what is there."""
        self.counted = getattr(self, "counted", 0) + 1
        if self.counted > 2 * self.begins and self.counted % 2:
            dist.all_reduce(self.model.wte.weight.grad)


class ExpertNotDivided(Experts):
    """The gradients of experts are sums where those of the others are means."""

    def reduce(self, step: int) -> None:
        """Undo the division."""
        super().reduce(step)
        if step >= self.begins:
            for p in self.model.experts.parameters():
                p.grad.mul_(self.world)


class MaskDrawnAgain(Averaged):
    """A checkpointed block draws another dropout mask when it runs again."""

    def before(self, step: int) -> None:
        """Checkpoint it without its random state."""
        if step == self.begins:
            block = self.model.blocks[0]
            forward = block.forward
            block.forward = lambda *args, **kwargs: checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )


class Again(Averaged):
    """The healthy twin: the block runs again with its random state."""

    def before(self, step: int) -> None:
        """Checkpoint it."""
        if step == self.begins:
            block = self.model.blocks[0]
            forward = block.forward
            block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


class LabelsShuffled(Vision):
    """The images are permuted and the labels are not."""

    def batch(self, step: int, micro: int) -> Batch:
        """Turn the images round."""
        x, y = super().batch(step, micro)
        return (x.flip(0), y) if step >= self.begins else (x, y)


class OptimizerMadeAnew(Averaged):
    """A new optimizer takes over; the scheduler goes on turning the rate of the old one."""

    def before(self, step: int) -> None:
        """Make it."""
        if step == self.begins:
            self.optimizer = self.make_optimizer()


class Doubled(torch.autograd.Function):
    """The identity whose backward is wrong by two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Any shape to the same."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Twice too much."""
        return 2 * g


class WrongBackward(Pair):
    """A kernel's backward gives twice the gradient."""

    def before(self, step: int) -> None:
        """Put it behind the first half."""
        if step == self.begins:
            self.model[0].register_forward_hook(lambda module, inputs, out: Doubled.apply(out))


UNSEEN_AGAIN: tuple[Bug, ...] = (
    bug(EpochNotTold, Epochs, at("batch")),
    bug(OneLayerEvaluating, Vision, at("1.1")),
    bug(GradientMasked, Averaged, at("blocks.1.linear1.weight")),
    bug(ScaleNotRenewed, Recurrent, at("loss_scale", "embedding.weight", "scale"), 10),
    bug(LaggingRank, ByHand, at("batch")),
    bug(ReplicasInTheNorm, Split, at("grad_norm")),
    bug(ShardsExchanged, Split, at("blocks.1.up")),
    bug(TieSummedTwice, Pipeline, at("wte.weight")),
    bug(ExpertNotDivided, Experts, at("experts.0.0.weight", "experts.1.0.weight")),
    bug(MaskDrawnAgain, Again, at("blocks.0", "blocks.0.self_attn", rules=("recomputed_forward",)), 10),
    bug(LabelsShuffled, Vision, at("loss", "batch"), 10),
    bug(OptimizerMadeAnew, Averaged, at("lr", "wte.weight")),
    bug(WrongBackward, Pair, at("0", "0.0.weight")),
)
