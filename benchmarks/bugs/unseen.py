"""Bugs that were written without a look at the detectors, and judged before any detector was changed for them.

The loops declare nothing: what finds these bugs finds them in a plain loop.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bugs.loops import Averaged, Batch, ByHand, Loop, Recurrent, Vision, Wrapped
from benchmarks.bugs.parallel_loops import Experts, Pipeline, Split
from benchmarks.bugs.published import Bug, at


class SumOfMicroBatches(Vision):
    """The loss of a micro-batch is not divided by their number; the noted loss is the mean."""

    def share(self, step: int, loss: Tensor) -> Tensor:
        """Leave it whole."""
        return loss if step >= self.begins else super().share(step, loss)


class ClearedInAccumulation(Vision):
    """zero_grad stands inside the loop over micro-batches."""

    def after_micro(self, step: int, micro: int) -> None:
        """Lose all but the last."""
        if step >= self.begins and micro + 1 < self.micro:
            self.optimizer.zero_grad()


class ScheduledByMicroBatch(Vision):
    """The scheduler is stepped with each micro-batch."""

    def after_micro(self, step: int, micro: int) -> None:
        """Step it."""
        if step >= self.begins and micro + 1 < self.micro:
            self.scheduler.step()


class SteppedTwice(Vision):
    """The optimizer is stepped a second time with the same gradients."""

    def update(self, step: int) -> None:
        """Step twice."""
        super().update(step)
        if step >= self.begins:
            self.optimizer.step()


class NormalisedByEvaluation(Vision):
    """The evaluation runs in training mode and moves the running statistics."""

    begins = 6

    def after(self, step: int) -> None:
        """Forget eval()."""
        if step < self.begins - 1:
            super().after(step)
        elif step % 3 == 2:
            with torch.no_grad():
                self.model(images_to_judge())


def images_to_judge() -> Tensor:
    """Return a batch that is not of the training."""
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(9))


class WithoutGradient(Vision):
    """A stage runs under no_grad."""

    def before(self, step: int) -> None:
        """Wrap its forward."""
        if step == self.begins:
            self.model[0].forward = torch.no_grad()(self.model[0].forward)


class ClippedBeforeUnscaling(Recurrent):
    """Scaled gradients are clipped."""

    def clip(self, step: int) -> Tensor | None:
        """Leave out unscale_."""
        return Loop.clip(self, step) if step >= self.begins else super().clip(step)


class SteppedPastTheScaler(Recurrent):
    """optimizer.step is called and not scaler.step: Adam hides that the gradients are 4,096 times too large."""

    def clip(self, step: int) -> Tensor | None:
        """Neither unscale nor clip."""
        return super().clip(step) if step < self.begins else None

    def update(self, step: int) -> None:
        """Step past the scaler."""
        if step < self.begins:
            super().update(step)
        else:
            self.optimizer.step()


class Detached(Recurrent):
    """The embedding is detached from what follows."""

    def before(self, step: int) -> None:
        """Detach its output from now on."""
        if step == self.begins:
            self.model.embedding.register_forward_hook(lambda module, inputs, out: out.detach())


class AverageNotPutBack(Averaged):
    """After the evaluation the training goes on with the average."""

    begins = 3

    def put_back(self, step: int, kept: dict[str, Tensor]) -> None:
        """Forget it."""


class UntiedByLoad(Averaged):
    """load_state_dict(assign=True) gives the head a weight of its own."""

    def before(self, step: int) -> None:
        """Load what was saved, with a copy for each name."""
        if step == self.begins:
            state = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.model.load_state_dict(state, assign=True)
            self.optimizer.param_groups[0]["params"] = list(self.model.parameters())


class Resumed(Averaged):
    """A GPT whose training is saved, made anew from another seed, and loaded, under a new probe. Healthy as it stands."""

    begins = 5

    def after(self, step: int) -> None:
        """Restart once."""
        if step == self.begins - 1:
            self.restart({k: getattr(self, k).state_dict() for k in ("model", "optimizer", "scheduler")})


class OptimizerNotLoaded(Resumed):
    """The optimizer starts afresh."""

    def load(self, saved: dict[str, Any]) -> None:
        """Leave the optimizer out; the scheduler sets the rate."""
        super().load({k: v for k, v in saved.items() if k != "optimizer"})


class SchedulerNotLoaded(Resumed):
    """The schedule begins again with its warm-up."""

    def load(self, saved: dict[str, Any]) -> None:
        """Leave the scheduler out."""
        super().load({k: v for k, v in saved.items() if k != "scheduler"})
        self.scheduler = self.make_scheduler()


class WeightsNotMatched(Resumed):
    """The saved names carry a prefix, and strict=False lets all of them pass by."""

    def load(self, saved: dict[str, Any]) -> None:
        """Load nothing into the model."""
        self.model.load_state_dict({f"module.{k}": v for k, v in saved["model"].items()}, strict=False)
        super().load({k: v for k, v in saved.items() if k != "model"})


class DataFromTheBeginning(Resumed):
    """The data starts again from its first batch."""

    def load(self, saved: dict[str, Any]) -> None:
        """Lose the place."""
        super().load(saved)
        self.data = torch.Generator().manual_seed(self.data_seed())


class Masters(Loop):
    """A bfloat16 MLP with float32 master weights that the optimizer steps. Healthy as it stands."""

    def build(self) -> nn.Module:
        """Make the model."""
        return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5)).bfloat16()

    def make_optimizer(self) -> Any:
        """Make the optimizer of the masters."""
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        return torch.optim.AdamW(self.masters, lr=2e-2)

    def clear(self, step: int) -> None:
        """Clear both."""
        self.model.zero_grad()
        super().clear(step)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw points of five clusters."""
        kinds = torch.randint(0, 5, (8,), generator=self.data)
        return (torch.randn(8, 12, generator=self.data) + kinds[:, None]).bfloat16(), kinds

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss in float32."""
        return functional.cross_entropy(out.float(), y)

    def clip(self, step: int) -> Tensor | None:
        """Hand the gradients over."""
        for p, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = p.grad.float()
        return None

    def update(self, step: int) -> None:
        """Step the masters and copy them back."""
        super().update(step)
        with torch.no_grad():
            for i, (p, master) in enumerate(zip(self.model.parameters(), self.masters, strict=True)):
                self.copy_back(step, i, p, master)

    def copy_back(self, step: int, index: int, p: Tensor, master: Tensor) -> None:
        """Round to bfloat16."""
        p.copy_(master)


class MasterNotCopied(Masters):
    """One master weight is not copied back: the forward of the next step runs with the old one."""

    begins = 4

    def copy_back(self, step: int, index: int, p: Tensor, master: Tensor) -> None:
        """Leave the second weight out."""
        if step < self.begins - 1 or index != 2:
            super().copy_back(step, index, p, master)


class Pair(Masters):
    """Two halves of an MLP with an optimizer each. Healthy as it stands."""

    def build(self) -> nn.Module:
        """Make both halves."""
        return nn.Sequential(
            nn.Sequential(nn.Linear(12, 32), nn.GELU()), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5))
        )

    def make_optimizer(self) -> Any:
        """Make one for each."""
        first, second = self.model
        return [
            torch.optim.Adam(first.parameters(), lr=1e-2),
            torch.optim.RMSprop(self.owned_by_second(first, second), lr=1e-3),
        ]

    def owned_by_second(self, first: nn.Module, second: nn.Module) -> Any:
        """Return what the second optimizer owns."""
        return second.parameters()

    def make_scheduler(self) -> Any:
        """Make none."""

    def batch(self, step: int, micro: int) -> Batch:
        """Draw points of five clusters."""
        x, y = super().batch(step, micro)
        return x.float(), y

    def clear(self, step: int) -> None:
        """Clear both."""
        for optimizer in self.optimizer:
            optimizer.zero_grad()

    def clip(self, step: int) -> Tensor | None:
        """Clip nothing."""
        return None

    def update(self, step: int) -> None:
        """Step both."""
        for optimizer in self.optimizer:
            optimizer.step()

    def schedule(self, step: int) -> None:
        """Keep the rates."""


class SecondNotStepped(Pair):
    """The second optimizer is not stepped."""

    def update(self, step: int) -> None:
        """Step the first."""
        for optimizer in self.optimizer[: 1 if step >= self.begins else 2]:
            optimizer.step()


class SecondNotCleared(Pair):
    """The second optimizer's gradients are kept."""

    def clear(self, step: int) -> None:
        """Clear the first."""
        for optimizer in self.optimizer[: 1 if step >= self.begins else 2]:
            optimizer.zero_grad()


class OwnedTwice(Pair):
    """The second optimizer owns everything."""

    begins = 0

    def owned_by_second(self, first: nn.Module, second: nn.Module) -> Any:
        """Return the parameters of both."""
        return self.model.parameters()


class Closure(Pair):
    """L-BFGS with a closure. Healthy as it stands."""

    def make_optimizer(self) -> Any:
        """Make it."""
        return torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe")

    def step(self, step: int) -> None:
        """One update."""
        x, y = self.batch(step, 0)

        def closure() -> Tensor:
            if not (step >= self.begins and self.keeps):
                self.optimizer.zero_grad()
            loss = self.loss(step, self.forward(step, x), y)
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        if self.probe:
            self.probe.note("loss", loss.detach())

    keeps = False


class ClosureNotCleared(Closure):
    """The closure keeps the gradients of the call before."""

    keeps = True


class StatisticsApart(Wrapped):
    """Running statistics are not shared: evaluations differ by rank."""

    def wrap(self) -> nn.Module:
        """Do not broadcast them."""
        return DistributedDataParallel(self.model, broadcast_buffers=False)


class ReducedTooEarly(Wrapped):
    """The first micro-batch is reduced and not the last."""

    def quiet(self, step: int, micro: int) -> Any:
        """Swap them."""
        return super().quiet(step, self.micro - 1 - micro if step >= self.begins else micro)


class SameOrderEachEpoch(Wrapped):
    """The sampler's epoch is not set: all epochs of five steps have the same order."""

    begins = 5

    def batch(self, step: int, micro: int) -> Batch:
        """Draw from the same twenty batches again."""
        if (step, micro) == (5, 0) or (step, micro) == (10, 0):
            self.data.manual_seed(self.data_seed())
        return super().batch(step, micro)


class OneNotDivided(ByHand):
    """One gradient is summed over the ranks and not divided."""

    def average_one(self, step: int, name: str, grad: Tensor) -> None:
        """Leave out the division."""
        super().average_one(step, name, grad)
        if step >= self.begins and name == "head.weight":
            grad.mul_(self.world)


class ClippedBeforeReducing(ByHand):
    """Each rank clips its own gradient by its own norm, and then they are averaged."""

    def reduce(self, step: int) -> None:
        """Wait."""
        if step < self.begins:
            super().reduce(step)

    def clip(self, step: int) -> Tensor | None:
        """Clip, then average."""
        norm = super().clip(step)
        if step >= self.begins:
            super().reduce(step)
        return norm


class OverflowOnOneRank(ByHand):
    """An overflow is seen before the reduction, by one rank alone, which skips its update."""

    def reduce(self, step: int) -> None:
        """Reduce, and then let one rank see an infinity of its own."""
        super().reduce(step)
        if step == self.begins and self.rank == 1:
            self.scaler.unscale_(self.optimizer)
            self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"][torch.device("cpu")].fill_(1.0)

    def clip(self, step: int) -> Tensor | None:
        """Unscale where it is not done yet."""
        return Loop.clip(self, step) if step == self.begins and self.rank == 1 else super().clip(step)


class EntryNotSummed(Split):
    """The gradient that leaves a column-parallel layer is not summed: norms before it see a part."""

    def before(self, step: int) -> None:
        """Take the function away from one block."""
        if step == self.begins:
            self.model.blocks[1].enter = lambda x: x


class BiasOnEachRank(Split):
    """The bias of a row-parallel layer is added before the sum, once a rank."""

    def before(self, step: int) -> None:
        """Add it early."""
        block = self.model.blocks[0]
        if step == self.begins:
            block.joined = lambda partial: block.leave(partial + block.down_bias)


class PositionsApart(Split):
    """The position embedding is drawn from each rank's own seed."""

    begins = 0

    def build(self) -> nn.Module:
        """Draw it anew."""
        model = super().build()
        nn.init.normal_(model.wpe.weight, generator=torch.Generator().manual_seed(self.rank))
        return model


class LossOfOwnVocabulary(Split):
    """The sum of exponentials runs over this rank's part of the vocabulary."""

    def over_ranks(self, step: int, total: Tensor) -> Tensor:
        """Leave the sum out."""
        return total if step >= self.begins else super().over_ranks(step, total)


class DropoutApart(Split):
    """Dropout of what is replicated draws differently on each rank."""

    def before(self, step: int) -> None:
        """Part the random streams."""
        if step == self.begins:
            torch.manual_seed(self.rank)


class TieNotSummed(Pipeline):
    """The gradients of the tied embedding stay apart."""

    def reduce(self, step: int) -> None:
        """Leave the sum out."""
        if step < self.begins:
            super().reduce(step)


class StaleActivation(Pipeline):
    """The second stage computes on the buffer of the micro-batch before."""

    def received(self, step: int, hidden: Tensor) -> Tensor:
        """Take the old buffer for the second micro-batch."""
        if step >= self.begins and hasattr(self, "kept"):
            return self.__dict__.pop("kept").clone()
        self.kept = hidden.clone()
        return hidden


class NormOfOwnStage(Pipeline):
    """Each stage clips by the norm of its own parameters."""

    def over_ranks(self, step: int, square: Tensor) -> Tensor:
        """Leave the sum out."""
        return square if step >= self.begins else super().over_ranks(step, square)


class RouterDetached(Experts):
    """The shares are detached: the router learns nothing."""

    begins = 0

    def build(self) -> nn.Module:
        """Detach them."""
        model = super().build()
        gates = model.gates
        model.gates = lambda shares: gates(shares).detach()
        return model


class RouterNotReduced(Experts):
    """Each rank trains a router of its own."""

    def average_one(self, step: int, name: str, grad: Tensor) -> None:
        """Leave it out."""
        if step < self.begins or not name.startswith("router"):
            super().average_one(step, name, grad)


def bug(run: type[Loop], twin: type[Loop], where: Any, within: int = 1) -> Bug:
    """Name a bug as its class is named."""
    return Bug(re.sub(r"(?<!^)(?=[A-Z])", " ", run.__name__).lower(), "unseen", run, twin, where, within)


UNSEEN = (
    bug(SumOfMicroBatches, Vision, at(rules=("declared_loss", "reported_loss")), 10),
    bug(ClearedInAccumulation, Vision, at(rules=("cleared_gradients", "declared_loss")), 10),
    bug(ScheduledByMicroBatch, Vision, at("lr")),
    bug(SteppedTwice, Vision, at(rules=("step_counters", "update_rule", "moment_recurrence", "movement"))),
    bug(NormalisedByEvaluation, Vision, at("0.1", "0.1.running_mean", "0.1.num_batches_tracked")),
    bug(WithoutGradient, Vision, at("0.0.weight", "0.1.weight", "0.0", "0.1")),
    bug(ClippedBeforeUnscaling, Recurrent, at("grad_norm")),
    bug(SteppedPastTheScaler, Recurrent, at(), 1),
    bug(Detached, Recurrent, at("embedding.weight", "embedding")),
    bug(AverageNotPutBack, Averaged, at("wte.weight")),
    bug(UntiedByLoad, Averaged, at("head.weight", "wte.weight")),
    bug(OptimizerNotLoaded, Resumed, at("wte.weight", rules=("moments_present", "step_counters", "saved_and_loaded"))),
    bug(SchedulerNotLoaded, Resumed, at("lr")),
    bug(WeightsNotMatched, Resumed, at("wte.weight")),
    bug(DataFromTheBeginning, Resumed, at("batch")),
    bug(MasterNotCopied, Masters, at("2.weight")),
    bug(SecondNotStepped, Pair, at("1.0.weight")),
    bug(SecondNotCleared, Pair, at("1.0.weight"), 2),
    bug(OwnedTwice, Pair, at("0.0.weight")),
    bug(ClosureNotCleared, Closure, at("0.0.weight")),
    bug(StatisticsApart, Wrapped, at("0.1.running_mean", "0.1.running_var")),
    bug(ReducedTooEarly, Wrapped, at("0.0.weight", rules=("replicas",))),
    bug(SameOrderEachEpoch, Wrapped, at("batch")),
    bug(OneNotDivided, ByHand, at("head.weight")),
    bug(ClippedBeforeReducing, ByHand, at(rules=("clipping", "gradient_norm", "scaled_replicas"))),
    bug(OverflowOnOneRank, ByHand, at(rules=("updated_replicas", "movement", "step_counters", "shared_scalars"))),
    bug(EntryNotSummed, Split, at("blocks.1.ln.weight", "wte.weight", "blocks.1.ln.bias")),
    bug(BiasOnEachRank, Split, at("blocks.0", "blocks.0.down_bias")),
    bug(PositionsApart, Split, at("wpe.weight")),
    bug(LossOfOwnVocabulary, Split, at("loss", "wte.weight")),
    bug(DropoutApart, Split, at("blocks.0.drop", "random state")),
    bug(TieNotSummed, Pipeline, at("wte.weight")),
    bug(StaleActivation, Pipeline, at("batch", "layers.1")),
    bug(NormOfOwnStage, Pipeline, at("grad_norm")),
    bug(RouterDetached, Experts, at("router.weight", "router")),
    bug(RouterNotReduced, Experts, at("router.weight")),
)
