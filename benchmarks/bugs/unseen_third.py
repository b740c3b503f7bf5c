"""A third set of bugs, in loops of further styles, written and judged once without a look at the relations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bugs.chunked_loops import Interleaved, Long
from benchmarks.bugs.loops import Averaged, Batch, Vision, Wrapped
from benchmarks.bugs.parallel_loops import Experts
from benchmarks.bugs.precise_loops import IGNORED, Adapters, LowRank, Padded, Sharded, Sixteen, SixteenWrapped
from benchmarks.bugs.published import Bug, at
from benchmarks.bugs.unseen import Masters, Resumed, bug
from benchmarks.bugs.unseen_third_ranks import (
    ChunksExchanged,
    CountedOverSteps,
    ExpertsAveraged,
    HalfOfTheBatchShared,
    HookWithoutDivision,
    IgnoredByShards,
    MeanOfHalves,
    MeanReported,
    NormOfOwnShard,
    OneChunkEvaluating,
    OneNotSummed,
    OwnLossReported,
    PositionsFromZero,
    RandomStateOfRankZero,
    ReducedAfterTheFirst,
    StateOfRankZero,
)
from trainprobe.engine.core.records import Finding

# ---- float16 ----------------------------------------------------------------------------------------------------------


class AuxiliaryNotScaled(Sixteen):
    """The second loss is not scaled, so that unscaling makes it vanish."""

    def backward(self, step: int, loss: Tensor) -> None:
        """Scale the first."""
        if step < self.begins:
            super().backward(step, loss)
        else:
            self.scaler.scale(self.losses[0]).backward(retain_graph=True)
            self.losses[1].backward()


class UnscaledTwice(Sixteen):
    """The gradients are divided by the scale by hand, and again by the scaler."""

    def clip(self, step: int) -> Tensor | None:
        """Divide by hand."""
        if step < self.begins:
            return super().clip(step)
        for p in self.model.parameters():
            p.grad.div_(self.scaler.get_scale())
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)


class ScaledNormReported(Sixteen):
    """The norm that is noted is that of the scaled gradients."""

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Note the wrong one."""
        assert norm is not None
        super().report(step, loss, norm * self.scaler.get_scale() if step >= self.begins else norm)


class ScaleApart(SixteenWrapped):
    """One rank alone halves its scale: the reduced gradient mixes two scales."""

    def before(self, step: int) -> None:
        """Halve it."""
        if step == self.begins and self.rank == 1:
            self.scaler.update(self.scaler.get_scale() / 2)


# ---- padding, labels, counts, a compiled model ------------------------------------------------------------------------


class AveragedOverPadding(Padded):
    """The loss is divided by all tokens, the padding too."""

    def counted(self, step: int, y: Tensor) -> float:
        """Count all."""
        return super().counted(step, y) if step < self.begins else sum(target.numel() for _, target in self.drawn)


class LabelsNotShifted(Padded):
    """The model is to predict the token that it sees."""

    def ragged(self) -> Batch:
        """Take the inputs as labels."""
        x, y = super().ragged()
        self.calls = getattr(self, "calls", 0) + 1
        return (x, torch.where(y == IGNORED, y, x)) if self.calls > self.begins * self.micro else (x, y)


class TokensOfOneMicroBatch(Padded):
    """The number of tokens that is noted is that of the last micro-batch."""

    def tokens(self, step: int) -> int:
        """Forget the others."""
        return super().tokens(step) if step < self.begins else self.drawn[-1][0].numel()


class CopyCompiled(Padded):
    """A copy of the model is compiled and called; the optimizer owns the original."""

    begins = 0

    def wrap(self) -> nn.Module:
        """Copy it first."""
        return torch.compile(copy.deepcopy(self.model), backend="aot_eager")


# ---- adapters, parameter groups, a fused optimizer --------------------------------------------------------------------


class DecayedTwice(Adapters):
    """Weights decay by AdamW, and by hand behind the update; the next step is the first with wrong weights."""

    begins = 4

    def update(self, step: int) -> None:
        """Decay once more."""
        super().update(step)
        if step >= self.begins - 1:
            with torch.no_grad():
                for group in self.optimizer.param_groups:
                    for p in group["params"]:
                        p.mul_(1 - group["lr"] * group["weight_decay"])


class UnmergedByHalf(Adapters):
    """After the evaluation the adapters are taken out of the frozen weights with another factor."""

    begins = 6

    def unmerge(self, step: int, layer: LowRank, weight: Tensor) -> None:
        """Forget the factor."""
        if step < self.begins - 1:
            super().unmerge(step, layer, weight)
        else:
            layer.base.weight.sub_(layer.up @ layer.down)


class ReentrantCheckpoint(Adapters):
    """What enters the checkpointed blocks needs no gradient, so that the reentrant kind gives their weights none."""

    def before(self, step: int) -> None:
        """Choose the reentrant kind."""
        self.model.reentrant = step >= self.begins


class Thawed(Adapters):
    """Frozen weights get gradients again: nobody steps them, but the norm that clips counts them."""

    def before(self, step: int) -> None:
        """Thaw all."""
        if step == self.begins:
            self.model.requires_grad_(True)


class CountersShared(Adapters):
    """A load gives all parameters one and the same step counter."""

    def before(self, step: int) -> None:
        """Share the first."""
        if step == self.begins:
            states = list(self.optimizer.state.values())
            for state in states:
                state["step"] = states[0]["step"]


class Layerwise(Resumed):
    """The blocks are groups with rates of their own. Healthy as it stands."""

    backwards = False

    def make_optimizer(self) -> Any:
        """Make a group of each block, and one of the rest."""
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("blocks.")]
        groups = [{"params": list(block.parameters()), "lr": 3e-3 / (i + 1)} for i, block in enumerate(self.model.blocks)]
        if self.backwards and hasattr(self, "probe"):
            groups.reverse()
        return torch.optim.AdamW([{"params": rest}, *groups], lr=3e-3, foreach=False)


class GroupsInAnotherOrder(Layerwise):
    """The optimizer that loads lists its groups in another order."""

    backwards = True


# ---- low precision, moving averages, values overwritten, reports --------------------------------------------------------


class MastersFromModel(Masters):
    """The master weights are made anew from the bfloat16 weights before each step."""

    def before(self, step: int) -> None:
        """Round them."""
        if step >= self.begins:
            with torch.no_grad():
                for p, master in zip(self.model.parameters(), self.masters, strict=True):
                    master.copy_(p)


class StateRounded(Masters):
    """The second moments are kept in bfloat16."""

    def before(self, step: int) -> None:
        """Round them."""
        if step >= self.begins:
            for state in self.optimizer.state.values():
                state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().float()


class StaleAverage(Averaged):
    """The moving average is not moved any more; evaluations go on with it."""

    def update(self, step: int) -> None:
        """Step only."""
        super().update(step) if step < self.begins else self.optimizer.step()


class ActivationOverwritten(Vision):
    """A buffer is used again before the backward pass has read it."""

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Keep what leaves the first stage."""
        hidden = self.model[0](x)
        out = self.model[2](self.model[1](hidden))
        if step >= self.begins:
            hidden.data[:4] = 0.0
        return out


class ByStages(Vision):
    """The stages are called one by one. Healthy as it stands."""

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Call them."""
        return self.model[2](self.model[1](self.model[0](x)))


class NormAfterClipping(Averaged):
    """The norm that is noted is that of the clipped gradients."""

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Measure again."""
        again = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        super().report(step, loss, again if step >= self.begins else norm)


class LossOfLastMicroBatch(Vision):
    """The loss that is noted is that of the last micro-batch."""

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Keep it."""
        self.last = super().loss(step, out, y)
        return self.last

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Note it."""
        super().report(step, self.last.detach() if step >= self.begins else loss, norm)


def inside(*parts: str) -> Callable[[Finding], bool]:
    """Return a judge of places: the site's name has one of `parts` in it."""
    return lambda finding: finding.site is not None and any(part in finding.site.name for part in parts)


UNSEEN_THIRD: tuple[Bug, ...] = (
    bug(ReducedAfterTheFirst, Sharded, at("wte.weight", "loss"), 10),
    bug(NormOfOwnShard, Sharded, at("grad_norm")),
    bug(StateOfRankZero, Sharded, at("wte.weight")),
    bug(IgnoredByShards, Sharded, at("wpe.weight")),
    bug(HookWithoutDivision, Wrapped, at("0.0.weight"), 10),
    bug(CountedOverSteps, Wrapped, at("0.0.weight")),
    bug(RandomStateOfRankZero, Wrapped, at("random state", "2.2")),
    bug(HalfOfTheBatchShared, Wrapped, at("batch")),
    bug(OwnLossReported, MeanReported, at("loss")),
    bug(AuxiliaryNotScaled, Sixteen, at("point.weight", "point", "trunk.0.weight", "loss"), 10),
    bug(UnscaledTwice, Sixteen, at("trunk.0.weight", "grad_norm"), 10),
    bug(ScaledNormReported, Sixteen, at("grad_norm")),
    bug(ScaleApart, SixteenWrapped, at("loss_scale")),
    bug(AveragedOverPadding, Padded, at("loss"), 10),
    bug(LabelsNotShifted, Padded, at("loss", "batch"), 10),
    bug(TokensOfOneMicroBatch, Padded, at("tokens")),
    bug(CopyCompiled, Padded, at("wte.weight")),
    bug(DecayedTwice, Adapters, inside("blocks.0.up", "blocks.0.down")),
    bug(UnmergedByHalf, Adapters, inside("base.weight")),
    bug(ReentrantCheckpoint, Adapters, inside("blocks.0")),
    bug(Thawed, Adapters, inside("wte", "rnn", "base")),
    bug(CountersShared, Adapters, inside("blocks.0")),
    bug(GroupsInAnotherOrder, Layerwise, inside("blocks.0", "blocks.1")),
    bug(OneChunkEvaluating, Interleaved, at("1", "1.layers.2", "1.layers.3")),
    bug(ChunksExchanged, Interleaved, inside("layers.")),
    bug(OneNotSummed, Long, at("ln.weight")),
    bug(MeanOfHalves, Long, at("wte.weight", "loss"), 10),
    bug(PositionsFromZero, Long, at("wpe.weight", "loss"), 10),
    bug(ExpertsAveraged, Experts, inside("experts.")),
    bug(MastersFromModel, Masters, at("0.weight")),
    bug(StateRounded, Masters, at("0.weight")),
    bug(StaleAverage, Averaged, inside("weight"), 10),
    bug(ActivationOverwritten, ByStages, at("0.0.weight", "1.0.weight", "0", "1", "loss"), 10),
    bug(NormAfterClipping, Averaged, at("grad_norm")),
    bug(LossOfLastMicroBatch, Vision, at("loss")),
)
