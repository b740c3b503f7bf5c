"""Which parameters a preflight tests: those that the loss of this step trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trainprobe.preflight.subject import Subject


def leave_other_losses(subject: Subject) -> None:
    """Test no parameter of an optimizer for another loss, as that of a generator is while its critic is trained.

    So are the heads of a critic that the loss of its generator does not reach: none of that model is in the optimizer that
    steps, and some is in another.
    """
    given = {id(subject.parameters[name]) for name in subject.base.gradients}
    held = subject.held
    others = {one for ids in held[1:] if ids.isdisjoint(given) for one in ids - held[0]}
    for root in subject.model.values() if isinstance(subject.model, nn.ModuleDict) and held else ():
        if held[0].isdisjoint(own := {id(p) for p in root.parameters()}):
            others |= own & set().union(*held) - given
    kept = {name: p for name, p in subject.parameters.items() if id(p) not in others}
    subject.of_other_losses, subject.parameters = len(subject.parameters) - len(kept), kept
    subject.of_this_loss = [ids for ids in held if ids.isdisjoint(others)]


def leave_copies(subject: Subject) -> None:
    """Test no parameter that no optimizer has of a copy, as an average of the weights is, or of a teacher.

    Nothing calls a copy, and a teacher is called with gradients disabled.
    """
    if subject.parameters.keys() == subject.base.gradients.keys():
        return
    held = set().union(*subject.held)
    modules = {name: dict(module.named_parameters()) for name, module in subject.model.named_modules() if name}
    called = [own for name, own in modules.items() if own and name in subject.base.calls]
    for name, own in modules.items():
        reached = any(f"{name}.{key}" in subject.base.gradients or id(p) in held for key, p in own.items())
        taught = bool(held) and name in subject.base.calls - subject.base.learns
        if own and not reached and (taught or any(_are_equal(own, other) for other in called)):
            copied = {f"{name}.{key}" for key in own}
            subject.parameters = {key: p for key, p in subject.parameters.items() if key not in copied}


def _are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Tell whether two modules have parameters of the same names and numbers, of which some are no constants."""
    if one is other or one.keys() != other.keys() or any(a.shape != other[key].shape for key, a in one.items()):
        return False
    drawn = any(bool((p != p.flatten()[:1]).any()) for p in one.values())
    return drawn and all(torch.equal(a, other[key]) for key, a in one.items())
