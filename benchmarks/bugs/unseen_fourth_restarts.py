"""The bugs of the fourth set in experts, restarts, scaled losses and policies."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bugs.loops import Batch
from benchmarks.bugs.token_loops import MainGradients, Policy, Routed, ScaledTwice

# ---- experts, and what a restart loses --------------------------------------------------------------------------------


class BalanceDetached(Routed):
    """The balancing loss is worked out of detached shares."""

    def before(self, step: int) -> None:
        """Detach them."""
        if step >= self.begins:
            for block in self.model.blocks:
                mean = type(block.moe).mean_shares
                block.moe.mean_shares = lambda shares, moe=block.moe, mean=mean: mean(moe, shares.detach())


class NoiseDrawnAgain(Routed):
    """The router's noise comes from a generator that checkpointing does not set back."""

    def before(self, step: int) -> None:
        """Draw from another."""
        if step == self.begins:
            other = torch.Generator().manual_seed(5)
            self.model.blocks[0].moe.noise = lambda x: 0.1 * torch.randn(*x.shape[:-1], 4, generator=other)


class ExpertsInAList(Routed):
    """The experts of a block are kept in a plain list, so that nobody knows them."""

    begins = 0

    def build(self) -> nn.Module:
        """Hide them."""
        model = super().build()
        moe = model.blocks[0].moe
        experts = list(moe.experts)
        del moe.experts
        moe.experts = experts
        return model


class BalanceNotLoaded(Routed):
    """A buffer is not in what is loaded, and strict=False lets that pass."""

    begins = 5

    def load(self, saved: dict[str, Any]) -> None:
        """Leave it out."""
        super().load(saved)
        kept = {name: value for name, value in saved["model"].items() if "balance" not in name}
        for block in self.model.blocks:
            block.moe.balance.zero_()
        self.model.load_state_dict(kept, strict=False)


class InitialisedBehindTheLoad(Routed):
    """A router is initialised after the weights were loaded."""

    begins = 5

    def load(self, saved: dict[str, Any]) -> None:
        """Initialise it."""
        super().load(saved)
        self.model.blocks[1].moe.router.reset_parameters()


class ForwardedTwice(Routed):
    """The scheduler is loaded, and then stepped to where it stands already."""

    begins = 5

    def load(self, saved: dict[str, Any]) -> None:
        """Step it once more."""
        super().load(saved)
        for _ in range(self.restarts):
            self.scheduler.step()


class BetasExchanged(Routed):
    """After the load the settings are written in again, with both betas exchanged."""

    begins = 5

    def load(self, saved: dict[str, Any]) -> None:
        """Exchange them."""
        super().load(saved)
        for group in self.optimizer.param_groups:
            group["betas"] = group["betas"][::-1]


class RandomStateNotLoaded(Routed):
    """The random state starts anew."""

    begins = 5

    def load(self, saved: dict[str, Any]) -> None:
        """Start where the first process did."""
        super().load(saved)
        torch.manual_seed(500 + self.rank + 1000 * self.seed)


# ---- scaled losses, low precision -------------------------------------------------------------------------------------


class ScaleRaisedInside(ScaledTwice):
    """The scale is doubled between two micro-batches of a step."""

    def after_micro(self, step: int, micro: int) -> None:
        """Double it."""
        if step >= self.begins and micro == 0:
            self.scaler.update(self.scaler.get_scale() * 2)


class ScalerNotLoaded(ScaledTwice):
    """The scaler starts with its first scale again."""

    begins = 5

    def load(self, saved: dict[str, Any]) -> None:
        """Leave it out."""
        super().load(saved | {"scaler": self.scaler.state_dict()})


class OverflowHidden(ScaledTwice):
    """The scale is too high, and what overflows becomes zero before the scaler looks."""

    def before(self, step: int) -> None:
        """Raise the scale."""
        if step == self.begins:
            self.scaler.update(2.0**30)

    def clip(self, step: int) -> Tensor | None:
        """Hide it."""
        for p in self.model.parameters():
            p.grad = p.grad.nan_to_num(0.0, 0.0, 0.0) if step >= self.begins else p.grad
        return super().clip(step)


class AddedUpInSixteen(MainGradients):
    """The gradients of the micro-batches are added up in bfloat16."""

    def added(self, step: int, total: Tensor | None, grad: Tensor) -> Tensor:
        """Round each sum."""
        whole = super().added(step, total, grad)
        return whole if step < self.begins else whole.bfloat16().float()


# ---- a policy ---------------------------------------------------------------------------------------------------------


class EngineNotSynced(Policy):
    """The engine that writes keeps old weights."""

    begins = 4

    def sync(self, step: int) -> None:
        """Leave it."""
        if step < self.begins:
            super().sync(step)


class ReferenceIsThePolicy(Policy):
    """The reference shares its weights with the policy."""

    def before(self, step: int) -> None:
        """Share them."""
        if step == self.begins:
            self.reference = copy.copy(self.model)


class AnswersExchanged(Policy):
    """The advantages are those of other answers."""

    begins = 4

    def batch(self, step: int, micro: int) -> Batch:
        """Turn them round."""
        tokens, advantages = super().batch(step, micro)
        return tokens, advantages if step < self.begins else advantages.flip(0)
