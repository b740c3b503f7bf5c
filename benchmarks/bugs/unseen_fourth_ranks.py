"""The bugs of the fourth set that need two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.bugs.modern_ranks import (
    ClippedExperts,
    MixedShards,
    Placed,
    Queued,
    ShardedOptimizer,
    SummedByHand,
    Tracked,
    Weighted,
)

# ---- a sharded optimizer ----------------------------------------------------------------------------------------------


class NotHandedOver(ShardedOptimizer):
    """One parameter is not handed over; the next step is the first that computes with it."""

    begins = 4

    def hand_over(self, step: int, name: str, value: Tensor, owner: int) -> None:
        """Leave it out."""
        if step < self.begins - 1 or name != "blocks.1.linear1.weight":
            super().hand_over(step, name, value, owner)


class ClippedByOwned(ShardedOptimizer):
    """Each rank clips what it owns by the norm of what it owns."""

    def clip(self, step: int) -> Tensor | None:
        """Clip what is owned."""
        return super().clip(step) if step < self.begins else nn.utils.clip_grad_norm_(self.owned(), 0.5)


class StatesExchanged(ShardedOptimizer):
    """The optimizer's state is loaded in another order: two norms of one shape are exchanged."""

    def before(self, step: int) -> None:
        """Exchange them."""
        if step == self.begins:
            names = {p: name for name, p in self.model.named_parameters()}
            norms = [i for i, p in enumerate(self.owned()) if names[p] in ("blocks.0.norm1.weight", "blocks.0.norm2.weight")]
            saved = self.optimizer.state_dict()
            if len(norms) == 2:
                first, second = norms
                saved["state"][first], saved["state"][second] = saved["state"][second], saved["state"][first]
            self.optimizer.load_state_dict(saved)


# ---- gradients summed by hand -----------------------------------------------------------------------------------------


class StaleBucket(SummedByHand):
    """One gradient goes into its bucket after the bucket has been summed: the step uses the sum of the step before."""

    def end(self, step: int, name: str, grad: Tensor) -> None:
        """Be one step behind."""
        super().end(step, name, grad)
        if name == "1.0.weight":
            fresh = grad.clone()
            if step >= self.begins:
                grad.copy_(self.bucket)
            self.bucket = fresh


class OwnGroup(SummedByHand):
    """One gradient is summed over a group that holds this rank alone."""

    def begin(self, step: int, name: str, grad: Tensor) -> Any:
        """Take the wrong group."""
        if not hasattr(self, "groups"):
            self.groups = [dist.new_group([rank]) for rank in range(self.world)]
        if step < self.begins or name != "1.0.weight":
            return super().begin(step, name, grad)
        return dist.all_reduce(grad, group=self.groups[self.rank], async_op=True)


class DividedByRanksOnly(SummedByHand):
    """The sum over micro-batches is not divided by their number."""

    def end(self, step: int, name: str, grad: Tensor) -> None:
        """Take the wrong divisor."""
        super().end(step, name, grad)
        if step >= self.begins:
            grad.mul_(self.micro)


class WaitedTooLate(SummedByHand):
    """The sum of one gradient lands in a buffer that is copied back behind the update."""

    def begin(self, step: int, name: str, grad: Tensor) -> Any:
        """Sum a copy."""
        if step < self.begins or name != "2.2.weight":
            return super().begin(step, name, grad)
        self.landed = grad.clone()
        return super().begin(step, name, self.landed)

    def update(self, step: int) -> None:
        """Copy it back."""
        super().update(step)
        if step >= self.begins:
            self.model[2][2].weight.grad.copy_(self.landed / (self.world * self.micro))


# ---- DistributedDataParallel, fully_shard, DTensor --------------------------------------------------------------------


class OwnTokens(Weighted):
    """Each rank divides by its own tokens; the mean over all tokens is noted."""

    def share(self, step: int, loss: Tensor) -> Tensor:
        """Count own."""
        return super().share(step, loss) if step < self.begins else loss / self.own


class LoadedByOne(Weighted):
    """Rank 0 goes back to older weights; the other rank is not told."""

    def before(self, step: int) -> None:
        """Load them on one rank."""
        if step == 1:
            self.older = {name: value.clone() for name, value in self.model.state_dict().items()}
        if step == self.begins and self.rank == 0:
            self.model.load_state_dict(self.older)


class ShardsOfTheOther(MixedShards):
    """A load gives each rank the other's shard of one weight."""

    def before(self, step: int) -> None:
        """Exchange them."""
        if step == self.begins:
            local = self.model.blocks[0].linear1.weight.to_local().data
            parts = [torch.empty_like(local) for _ in range(self.world)]
            dist.all_gather(parts, local)
            local.copy_(parts[1 - self.rank])


class TimesRanks(MixedShards):
    """The loss is multiplied by the number of ranks, as if the gradients were to be divided once more."""

    def share(self, step: int, loss: Tensor) -> Tensor:
        """Multiply."""
        return super().share(step, loss) * (self.world if step >= self.begins else 1)


class NotToldPartial(Placed):
    """Torch is not told that the gradient of a norm is a partial sum, and takes it for the whole."""

    def before(self, step: int) -> None:
        """Forget it."""
        if step == self.begins:
            self.model.blocks[0].parted = None


# ---- stages, experts, random streams ----------------------------------------------------------------------------------


class OutOfOrder(Queued):
    """The first stage takes the youngest micro-batch first: gradients arrive at activations of others."""

    def next(self, step: int, left: Any) -> Any:
        """Take the wrong end."""
        return left.pop() if step >= self.begins and self.rank == 0 else super().next(step, left)


class TableLoadedOnFirst(Queued):
    """Older weights are loaded on the first stage alone; the table is held by both."""

    def before(self, step: int) -> None:
        """Load the table there."""
        if step == 1:
            self.older = self.model["table"].weight.detach().clone()
        if step == self.begins and self.rank == 0:
            self.model["table"].weight.data.copy_(self.older)


class NormOfOwnExpert(ClippedExperts):
    """Each rank clips by a norm that counts its own expert alone."""

    def over_ranks(self, step: int, square: Tensor) -> Tensor:
        """Leave the sum out."""
        return square if step >= self.begins else super().over_ranks(step, square)


class InnerDropoutAlike(Tracked):
    """The streams of what is split are seeded alike on all ranks."""

    def before(self, step: int) -> None:
        """Seed them."""
        if step == self.begins:
            for i, block in enumerate(self.model.blocks):
                block.stream = torch.Generator().manual_seed(31 + 10 * i).get_state()
