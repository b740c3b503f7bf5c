"""A fourth set of bugs, with other models and mechanisms, written and judged once without a look at the relations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.bugs.modern_loops import Diffusion, Distilled, Patches, Streamed, halved
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
from benchmarks.bugs.precise_loops import IGNORED
from benchmarks.bugs.published import Bug, at
from benchmarks.bugs.token_loops import MainGradients, Policy, Routed, ScaledTwice, Translator
from benchmarks.bugs.unseen import bug
from benchmarks.bugs.unseen_fourth_ranks import (
    ClippedByOwned,
    DividedByRanksOnly,
    InnerDropoutAlike,
    LoadedByOne,
    NormOfOwnExpert,
    NotHandedOver,
    NotToldPartial,
    OutOfOrder,
    OwnGroup,
    OwnTokens,
    ShardsOfTheOther,
    StaleBucket,
    StatesExchanged,
    TableLoadedOnFirst,
    TimesRanks,
    WaitedTooLate,
)
from benchmarks.bugs.unseen_fourth_restarts import (
    AddedUpInSixteen,
    AnswersExchanged,
    BalanceDetached,
    BalanceNotLoaded,
    BetasExchanged,
    EngineNotSynced,
    ExpertsInAList,
    ForwardedTwice,
    InitialisedBehindTheLoad,
    NoiseDrawnAgain,
    OverflowHidden,
    RandomStateNotLoaded,
    ReferenceIsThePolicy,
    ScaleRaisedInside,
    ScalerNotLoaded,
)
from benchmarks.bugs.unseen_third import inside

# ---- a vision transformer ---------------------------------------------------------------------------------------------


class ScheduledFirst(Patches):
    """The scheduler is stepped before the optimizer."""

    def update(self, step: int) -> None:
        """Exchange them."""
        if step >= self.begins:
            self.scheduler.step()
        super().update(step)

    def schedule(self, step: int) -> None:
        """It is done."""
        if step < self.begins:
            super().schedule(step)


class TrainForgotten(Patches):
    """After an evaluation the whole model stays in evaluation mode."""

    begins = 6

    def train_again(self, step: int) -> None:
        """Forget it."""
        if step < self.begins - 1:
            super().train_again(step)


class ThroughNumpy(Patches):
    """What leaves the first layer makes a detour past autograd."""

    def before(self, step: int) -> None:
        """Go through NumPy."""
        if step == self.begins:
            self.model.between = lambda x: torch.from_numpy(x.detach().numpy().copy())


class NormsDecayed(Patches):
    """A callback sets one decay for all groups."""

    def before(self, step: int) -> None:
        """Set it."""
        if step == self.begins:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.05


class HookedAgain(Patches):
    """The hook that halves a gradient is registered a second time."""

    def before(self, step: int) -> None:
        """Register it."""
        if step == self.begins:
            self.model.patch.weight.register_hook(halved)


class HeadReplaced(Patches):
    """The model gets a new head behind the optimizer's back."""

    def before(self, step: int) -> None:
        """Replace it."""
        if step == self.begins:
            self.model.head = nn.Linear(16, 5)


class AverageOfItself(Patches):
    """The copy that is averaged follows itself."""

    def averaged_from(self, step: int) -> nn.Module:
        """Take the wrong model."""
        return self.model if step < self.begins else self.copy


# ---- an LSTM, diffusion, a teacher ------------------------------------------------------------------------------------


class ClippedBehindTheUpdate(Streamed):
    """The gradients are clipped when they have been applied."""

    def clip(self, step: int) -> Tensor | None:
        """Wait."""
        return super().clip(step) if step < self.begins else None

    def update(self, step: int) -> None:
        """Update first."""
        super().update(step)
        self.late = super().clip(step) if step >= self.begins else None

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Note what the clipping said."""
        super().report(step, loss, norm if self.late is None else self.late)


class ParametersUsedUp(Streamed):
    """The parameters to clip are a generator that is empty after the first step."""

    begins = 1

    def clip(self, step: int) -> Tensor | None:
        """Clip what is left."""
        if step == 0:
            self.parameters = self.model.parameters()
        return nn.utils.clip_grad_norm_(self.parameters, 0.05)


class SeededEachStep(Diffusion):
    """Each step begins with the same seed: noise and times repeat."""

    def before(self, step: int) -> None:
        """Seed."""
        if step >= self.begins - 1:
            torch.manual_seed(1234)


class MomentumOverwritten(Diffusion):
    """The orthogonal direction is written over the momentum."""

    def before(self, step: int) -> None:
        """Switch it on."""
        self.optimizer[0].overwrites = step >= self.begins


class TeacherOfItself(Distilled):
    """The teacher follows the teacher."""

    def followed(self, step: int) -> nn.Module:
        """Take the wrong model."""
        return super().followed(step) if step < self.begins else self.model["teacher"]


# ---- encoder and decoder ----------------------------------------------------------------------------------------------


class MeanOfMeans(Translator):
    """Each micro-batch is divided by its own tokens; the mean over all tokens is noted."""

    def counted(self, step: int, y: Tensor) -> float:
        """Count own."""
        return super().counted(step, y) if step < self.begins else self.micro * int((y != IGNORED).sum())


class SeesTheNext(Translator):
    """The causal mask is off by one: each position sees the next one."""

    def before(self, step: int) -> None:
        """Move it."""
        if step == self.begins:
            self.model.decoder.own.first_hidden = 2


class SharedOverQueries(Translator):
    """The softmax of the decoder's attention runs over the queries."""

    def before(self, step: int) -> None:
        """Take the other axis."""
        if step == self.begins:
            self.model.decoder.own.shared_over = -2


class FrozenAgain(Translator):
    """A callback freezes the encoder in the middle of the training."""

    def before(self, step: int) -> None:
        """Freeze it."""
        if step == self.begins:
            self.model.encoder.requires_grad_(False)


UNSEEN_FOURTH: tuple[Bug, ...] = (
    bug(ScheduledFirst, Patches, at("lr")),
    bug(TrainForgotten, Patches, at("root", "blocks", "blocks.0", "blocks.0.drop")),
    bug(ThroughNumpy, Patches, at("patch", "patch.weight", "patch.bias")),
    bug(NormsDecayed, Patches, inside("weight_decay", "token", "position", "bias", "ln")),
    bug(HookedAgain, Patches, at("patch.weight", "patch"), 10),
    bug(HeadReplaced, Patches, at("head.weight", "head")),
    bug(AverageOfItself, Patches, inside("copy", "average"), 10),
    bug(ClippedBehindTheUpdate, Streamed, at("grad_norm", "embedding.weight")),
    bug(ParametersUsedUp, Streamed, at("grad_norm")),
    bug(SeededEachStep, Diffusion, at("random state", "batch")),
    bug(MomentumOverwritten, Diffusion, inside("weight")),
    bug(TeacherOfItself, Distilled, inside("teacher"), 10),
    bug(MeanOfMeans, Translator, at("loss"), 10),
    bug(SeesTheNext, Translator, inside("decoder", "loss"), 10),
    bug(SharedOverQueries, Translator, inside("decoder", "loss"), 10),
    bug(FrozenAgain, Translator, inside("encoder")),
    bug(BalanceDetached, Routed, inside("router", "loss"), 10),
    bug(NoiseDrawnAgain, Routed, inside("blocks.0"), 10),
    bug(ExpertsInAList, Routed, inside("blocks.0.moe", "experts")),
    bug(BalanceNotLoaded, Routed, inside("balance")),
    bug(InitialisedBehindTheLoad, Routed, inside("blocks.1.moe.router")),
    bug(ForwardedTwice, Routed, at("lr")),
    bug(BetasExchanged, Routed, inside("betas", "table.weight")),
    bug(RandomStateNotLoaded, Routed, at("random state")),
    bug(ScaleRaisedInside, ScaledTwice, at("loss_scale", "0.0.weight", "loss")),
    bug(ScalerNotLoaded, ScaledTwice, at("loss_scale")),
    bug(OverflowHidden, ScaledTwice, at("loss_scale", "grad_norm", "0.0.weight", "2.2.weight")),
    bug(AddedUpInSixteen, MainGradients, inside("weight", "bias"), 10),
    bug(EngineNotSynced, Policy, inside("engine", "batch", "loss"), 10),
    bug(ReferenceIsThePolicy, Policy, inside("reference", "loss"), 10),
    bug(AnswersExchanged, Policy, inside("batch", "loss"), 10),
    bug(NotHandedOver, ShardedOptimizer, at("blocks.1.linear1.weight")),
    bug(ClippedByOwned, ShardedOptimizer, at("grad_norm", "clip coefficient")),
    bug(StatesExchanged, ShardedOptimizer, inside("blocks.0.norm1", "blocks.0.norm2")),
    bug(StaleBucket, SummedByHand, at("1.0.weight"), 10),
    bug(OwnGroup, SummedByHand, at("1.0.weight")),
    bug(DividedByRanksOnly, SummedByHand, at("0.0.weight", "loss"), 10),
    bug(WaitedTooLate, SummedByHand, at("2.2.weight")),
    bug(OwnTokens, Weighted, at("loss"), 10),
    bug(LoadedByOne, Weighted, at("wte.weight")),
    bug(ShardsOfTheOther, MixedShards, at("blocks.0.linear1.weight")),
    bug(TimesRanks, MixedShards, at("wte.weight", "loss"), 10),
    bug(NotToldPartial, Placed, at("blocks.0.ln.weight")),
    bug(OutOfOrder, Queued, inside("table", "layer0"), 10),
    bug(TableLoadedOnFirst, Queued, at("table.weight")),
    bug(NormOfOwnExpert, ClippedExperts, at("grad_norm")),
    bug(InnerDropoutAlike, Tracked, inside("blocks", "random")),
)
