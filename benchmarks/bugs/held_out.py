"""Bugs of the same families that the detectors were not built against."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bugs.data_parallel import Batch, DataParallelRun
from benchmarks.bugs.published import Bug, ByHand, at
from benchmarks.bugs.tensor_parallel import TensorParallelRun


class ReplicasCountedTwice(TensorParallelRun):
    """The squares of replicated gradients are summed over the ranks too."""

    def norm(self, step: int) -> Tensor:
        """Sum everything over everybody."""
        if step < self.begins:
            return super().norm(step)
        total = torch.zeros(())
        for p in self.model.parameters():
            total = total + p.grad.square().sum()
        dist.all_reduce(total)
        return total.sqrt()


class WeightOverwritten(TensorParallelRun):
    """A replicated weight is written to in place on one rank."""

    def reduce(self, step: int) -> None:
        """Write past autograd."""
        super().reduce(step)
        if step == self.begins and self.rank == 1:
            self.model.layers[0].ln.weight.data[2] += 1e-3


class MomentsSwapped(DataParallelRun):
    """A load gives two layers each other's moments."""

    def resume(self, step: int) -> None:
        """Swap them."""
        a, b = (self.optimizer.state[block.fc1.weight] for block in self.model.blocks)
        for key in ("exp_avg", "exp_avg_sq"):
            a[key], b[key] = b[key], a[key]


class CounterReset(DataParallelRun):
    """A resume loses the step counters and keeps the moments."""

    def resume(self, step: int) -> None:
        """Lose them."""
        for state in self.optimizer.state.values():
            state["step"].zero_()


class StillEvaluating(DataParallelRun):
    """The training goes on in evaluation mode."""

    def evaluate(self, step: int) -> None:
        """Forget to switch back."""
        super().evaluate(step)
        self.model.eval()


class EvaluatingOnOneRank(DataParallelRun):
    """One rank leaves dropout off."""

    def before(self, step: int) -> None:
        """Switch it off."""
        if step >= self.begins and self.rank == 1:
            self.model.blocks[0].drop.eval()


class FunctionalDropout(DataParallelRun):
    """A dropout that does not know about evaluation."""

    begins = 2

    def evaluate(self, step: int) -> None:
        """Evaluate with it."""
        forward = self.model.ln.forward
        self.model.ln.forward = lambda x: functional.dropout(forward(x), 0.1)
        super().evaluate(step)
        del self.model.ln.forward


class RateOnOneRank(DataParallelRun):
    """One rank lowers its learning rate by itself."""

    def before_update(self, step: int) -> None:
        """Lower it."""
        if step >= self.begins and self.rank == 1:
            self.optimizer.param_groups[0]["lr"] *= 0.5


class MicroBatchTwice(DataParallelRun):
    """The second micro-batch is the first again."""

    def batch(self, step: int, micro: int) -> Batch:
        """Draw it once."""
        drawn = super().batch(step, micro)
        if micro and step >= self.begins:
            return self.kept
        self.kept = drawn
        return drawn


class SummedNotAveraged(DataParallelRun):
    """Gradients are summed over the ranks and not averaged."""

    def reduced(self, step: int) -> None:
        """Undo the average."""
        if step >= self.begins:
            for p in self.model.parameters():
                p.grad.mul_(self.world)


class FrozenByAccident(ByHand):
    """A block stops being trainable."""

    def before(self, step: int) -> None:
        """Freeze it."""
        if step == self.begins:
            self.model.blocks[0].qkv.weight.requires_grad_(False)


class ForgottenGroup(DataParallelRun):
    """A norm is left out of the parameter groups."""

    begins = 0

    def before(self, step: int) -> None:
        """Leave it out."""
        if step == 0:
            group = self.optimizer.param_groups[0]
            group["params"] = [p for p in group["params"] if p is not self.model.ln.weight]


class DifferentStart(DataParallelRun):
    """One rank starts from other weights, after wrapping."""

    begins = 0

    def wrap(self) -> nn.Module:
        """Change one weight."""
        wrapped = super().wrap()
        if self.rank == 1:
            with torch.no_grad():
                self.model.wpe.weight.mul_(1.01)
        return wrapped


class IgnoredByWrapper(DataParallelRun):
    """One parameter is left out of the reduction."""

    begins = 0

    def wrap(self) -> nn.Module:
        """Have it ignored."""
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ["blocks.1.ln1.bias"])
        return super().wrap()


class DecayOnOneRank(DataParallelRun):
    """One rank decays its weights by another amount."""

    def before(self, step: int) -> None:
        """Change it."""
        if step == self.begins and self.rank == 1:
            self.optimizer.param_groups[0]["weight_decay"] = 0.0


class SkippedOnOneRank(ByHand):
    """One rank skips an update."""

    def before_update(self, step: int) -> None:
        """Drop its gradients."""
        if step == self.begins and self.rank == 1:
            for p in self.model.parameters():
                p.grad = None


class ClearedBetweenMicroBatches(DataParallelRun):
    """Gradients are cleared between the micro-batches of a step."""

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Clear them."""
        if step >= self.begins:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
        return super().forward(step, x)


class WeightsSwappedOnLoad(DataParallelRun):
    """A load exchanges the weights of two layers."""

    def resume(self, step: int) -> None:
        """Exchange them."""
        a, b = (block.proj.weight for block in self.model.blocks)
        with torch.no_grad():
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)


class StuckData(DataParallelRun):
    """The data iterator gives the same step again and again."""

    def batch(self, step: int, micro: int) -> Batch:
        """Stand still; the batch of the step before is the first that is seen twice."""
        kept = self.__dict__.setdefault("kept_batches", {})
        if step >= self.begins:
            return kept[micro]
        kept[micro] = super().batch(step, micro)
        return kept[micro]


DP, TP = DataParallelRun, TensorParallelRun
HELD_OUT = (
    Bug("replicas counted twice", "held out", ReplicasCountedTwice, TP, at("grad_norm")),
    Bug("weight overwritten on one rank", "held out", WeightOverwritten, TP, at("layers.0.ln.weight")),
    Bug("moments swapped", "held out", MomentsSwapped, DP, at("blocks.0.fc1.weight", "blocks.1.fc1.weight")),
    Bug("counter reset", "held out", CounterReset, DP, at(rules=("step_counters",))),
    Bug("still evaluating", "held out", StillEvaluating, DP, at(rules=("modes",))),
    Bug("evaluating on one rank", "held out", EvaluatingOnOneRank, DP, at("blocks.0.drop")),
    Bug("functional dropout", "held out", FunctionalDropout, DP, at("ln"), 10),
    Bug("rate on one rank", "held out", RateOnOneRank, DP, at("lr")),
    Bug("micro-batch twice", "held out", MicroBatchTwice, DP, at("batch")),
    Bug("summed, not averaged", "held out", SummedNotAveraged, DP, at(rules=("declared_loss",)), 10),
    Bug("frozen by accident", "held out", FrozenByAccident, ByHand, at("blocks.0.qkv.weight")),
    Bug("forgotten group", "held out", ForgottenGroup, DP, at("ln.weight")),
    Bug("ignored by the wrapper", "held out", IgnoredByWrapper, DP, at("blocks.1.ln1.bias")),
    Bug("decay on one rank", "held out", DecayOnOneRank, DP, at(rules=("updated_replicas",))),
    Bug(
        "skipped on one rank",
        "held out",
        SkippedOnOneRank,
        ByHand,
        at(rules=("replicas",), slots=("grad",)),
    ),
    Bug("cleared between micro-batches", "held out", ClearedBetweenMicroBatches, DP, at(rules=("declared_loss",)), 10),
    Bug("weights swapped on load", "held out", WeightsSwappedOnLoad, DP, at("blocks.0.proj.weight", "blocks.1.proj.weight")),
    Bug("stuck data", "held out", StuckData, DP, at("batch")),
    Bug("different start", "held out", DifferentStart, DP, at("wpe.weight")),
)
