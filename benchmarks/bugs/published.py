"""The sixteen published bugs: each is what a class overrides, with its source and what must be named first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.bugs.data_parallel import DataParallelRun, nll
from benchmarks.bugs.tensor_parallel import TensorParallelRun
from trainprobe.engine.core.records import Finding


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug: the run that has it, its healthy twin, and whether a finding names the right place.

    within: how many collected steps it may take.
    """

    name: str
    source: str
    run: type[Any]
    twin: type[Any]
    located: Callable[[Finding], bool]
    within: int = 1


def at(*names: str, rules: tuple[str, ...] = (), slots: tuple[str, ...] = ()) -> Callable[[Finding], bool]:
    """Return a judge of places: the site's name is one of `names` (or any), its slot and rule among those given."""

    def located(finding: Finding) -> bool:
        site = finding.site
        return (
            site is not None
            and (not names or site.name in names)
            and (not rules or finding.rule in rules)
            and (not slots or site.slot in slots)
        )

    return located


class ClippedOnRankZero(TensorParallelRun):
    """1: only tensor-parallel rank 0 clips."""

    def clip(self, step: int, norm: Tensor) -> None:
        """Clip on one rank."""
        if self.rank == 0 or step < self.begins:
            super().clip(step, norm)


class NormNotReduced(TensorParallelRun):
    """2: the gradient of a sequence-parallel norm stays a partial sum."""

    def reduce_one(self, step: int, name: str, p: nn.Parameter) -> None:
        """Leave one norm out."""
        if name != "layers.1.ln.weight" or step < self.begins:
            super().reduce_one(step, name, p)


class ShardedNormNotReduced(TensorParallelRun):
    """3: each rank takes the norm of its own shards."""

    def joined(self, step: int, split: Tensor) -> Tensor:
        """Leave the sum out."""
        return super().joined(step, split) if step < self.begins else split


class WrapperNotCalled(DataParallelRun):
    """4: the model is called and not its wrapper."""

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Go past the wrapper."""
        return self.model(x) if step >= self.begins else self.ddp(x)


def replace_parameters(model: nn.Module) -> None:
    """Cast there and back in a way that makes new parameters."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
        model.float()
        model.head.weight = model.wte.weight
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


class ReplacedAfterWrapping(DataParallelRun):
    """5: parameters are replaced after wrapping; the optimizer is made anew."""

    def before(self, step: int) -> None:
        """Replace them."""
        if step == self.begins:
            replace_parameters(self.model)
            self.optimizer.param_groups[0]["params"] = list(self.model.parameters())
            self.optimizer.state.clear()


class StaleOptimizer(DataParallelRun):
    """6: parameters are replaced and the optimizer is kept."""

    def wrap(self) -> nn.Module:
        """No wrapper: gradients are averaged by hand, so that only the optimizer is stale."""
        return self.model

    def reduced(self, step: int) -> None:
        """Average the gradients."""
        for p in self.model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad.div_(self.world)

    def before(self, step: int) -> None:
        """Replace them."""
        if step == self.begins:
            replace_parameters(self.model)


class ByHand(StaleOptimizer):
    """The healthy twin of 6."""

    def before(self, step: int) -> None:
        """Replace nothing."""


class NotCleared(DataParallelRun):
    """7: no zero_grad."""

    def clear(self, step: int) -> None:
        """Forget it."""
        if step < self.begins:
            super().clear(step)


class MeanOfMeans(DataParallelRun):
    """8: every micro-batch is normalised by itself."""

    def loss(self, step: int, logits: Tensor, y: Tensor, counted: Tensor) -> Tensor:
        """Average the means."""
        return nll(logits, y) / (y >= 0).sum() / 2 if step >= self.begins else super().loss(step, logits, y, counted)


class MomentsLost(DataParallelRun):
    """9: a resume brings the counters back and not the moments."""

    def resume(self, step: int) -> None:
        """Lose them."""
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()


class TieBroken(DataParallelRun):
    """10: the head gets a weight of its own."""

    def before(self, step: int) -> None:
        """Clone it once."""
        if step == self.begins:
            self.model.head.weight = nn.Parameter(self.model.wte.weight.detach().clone())


class SameData(DataParallelRun):
    """11: every rank draws the same data."""

    begins = 0

    def data_seed(self) -> int:
        """Leave the rank out of the seed."""
        return 100


class PayloadLost(DataParallelRun):
    """12: a collective leaves one tensor empty on one rank."""

    def reduced(self, step: int) -> None:
        """Lose it."""
        if step >= self.begins and self.rank == 1:
            self.model.blocks[1].fc1.weight.grad.zero_()


class FlippedBit(DataParallelRun):
    """13: an exponent bit of one weight flips on one rank."""

    def before(self, step: int) -> None:
        """Flip it."""
        if step == self.begins and self.rank == 1:
            bits = self.model.blocks[0].fc2.weight.data.view(torch.int32)
            bits[3, 7] ^= 1 << 24


class ScaledByGroupSize(DataParallelRun):
    """14: the loss is scaled by the size of the context-parallel group."""

    def reduced(self, step: int) -> None:
        """Double every gradient; Adam hides it."""
        if step >= self.begins:
            for p in self.model.parameters():
                p.grad.mul_(2)


class ScheduledTwice(DataParallelRun):
    """15: the scheduler is stepped once a rank."""

    def schedule(self, step: int) -> None:
        """Step it too often."""
        self.scheduler.step()
        if step >= self.begins:
            self.scheduler.step()


class DropoutInEvaluation(DataParallelRun):
    """16: a block stays in training mode in evaluation."""

    begins = 2

    def evaluate(self, step: int) -> None:
        """Leave it there."""
        self.model.eval()
        self.model.blocks[1].train()
        with torch.no_grad():
            self.model(torch.arange(8)[None])
        self.model.train()


TP, DP = TensorParallelRun, DataParallelRun
REPLICATED = (
    "wte.weight",
    "layers.0.ln.weight",
    "layers.0.ln.bias",
    "layers.1.ln.weight",
    "layers.1.ln.bias",
    "ln.weight",
    "ln.bias",
    "head.weight",
)
PUBLISHED = (
    Bug("1 clip on one rank", "DeepSpeed 1801", ClippedOnRankZero, TP, at(*REPLICATED, rules=("scaled_replicas",))),
    Bug("2 norm not reduced", "Megatron-LM 1446", NormNotReduced, TP, at("layers.1.ln.weight")),
    Bug("3 sharded norm", "pytorch 170862", ShardedNormNotReduced, TP, at("grad_norm", rules=("gradient_norm",))),
    Bug(
        "4 wrapper not called",
        "TrainCheck set",
        WrapperNotCalled,
        DP,
        at(rules=("replicas",), slots=("grad_unclipped", "grad")),
    ),
    Bug("5 replaced after DDP", "pytorch 104336", ReplacedAfterWrapping, DP, at(rules=("parameter_objects",))),
    Bug("6 stale optimizer", "accelerate 2665", StaleOptimizer, ByHand, at(rules=("ownership",))),
    Bug("7 gradients kept", "several", NotCleared, DP, at(rules=("cleared_gradients",))),
    Bug("8 mean of means", "transformers 34191", MeanOfMeans, DP, at(rules=("declared_loss",)), 10),
    Bug("9 moments lost", "several", MomentsLost, DP, at(rules=("moments_present", "untouched_between_steps"))),
    Bug("10 tie broken", "Megatron-LM 656", TieBroken, DP, at("head.weight")),
    Bug("11 same data", "pytorch 56488", SameData, DP, at("batch")),
    Bug("12 payload lost", "pytorch 84803", PayloadLost, DP, at("blocks.1.fc1.weight")),
    Bug("13 flipped bit", "hardware", FlippedBit, DP, at("blocks.0.fc2.weight")),
    Bug("14 scaled loss", "Megatron-LM 906", ScaledByGroupSize, DP, at(rules=("declared_loss",)), 10),
    Bug("15 schedule", "accelerate 2926", ScheduledTwice, DP, at("lr")),
    Bug("16 dropout alive", "transformers 33844", DropoutInEvaluation, DP, at("blocks.1.drop"), 10),
)
