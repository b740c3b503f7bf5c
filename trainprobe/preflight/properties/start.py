"""Start: the first loss is no worse than a guess, tied weights are tied, every weight is trained, evaluation is repeatable."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import isfinite, log

from torch.nn.functional import cross_entropy

from trainprobe.engine.capture.step_gradients import relative
from trainprobe.engine.capture.step_modes import Quiet
from trainprobe.engine.core.words import and_more
from trainprobe.preflight import layers
from trainprobe.preflight.properties.causality import targets_of
from trainprobe.preflight.report import Line, broken, by_design, holds
from trainprobe.preflight.subject import Seen, Subject

ABOVE = 2.0  # nats over the uniform prediction, from which logits are told to be large
TWICE = 2.0  # times the uniform prediction, from which they are called too large


def examine(subject: Subject) -> Line:
    """Look at the loss, the weights and an evaluation before anything is trained."""
    for look in (_ties, _unreached, _optimizers):
        if (bad := look(subject)) is not None:
            return bad
    seen = subject.run(backward=False, evaluate=True, outputs=True)
    if (bad := _evaluation(subject, seen)) is not None:
        return bad
    if text := layers.fault(seen, subject):
        return broken(text)
    subject.guard.rewind()
    guess, apart = _uniform(subject), subject.of_other_losses
    others = [f"{apart} parameters belong to the optimizer of another loss"] if apart else []
    rest = "; ".join(["evaluation is repeatable", *others, *layers.remarks(seen, subject)])
    if guess is None:
        return holds(rest)
    own, uniform, classes = guess
    if own > uniform + ABOVE:
        text = f"the loss begins at {own:.3g}, a uniform prediction of {classes} classes has {uniform:.3g}"
        far = own > TWICE * uniform + ABOVE
        told = broken(f"{text}: the logits are too large") if far else holds(f"{text}: the logits are large; {rest}")
        return replace(told, figures={"loss": own, "uniform": uniform})
    return holds(f"loss {own:.4g}, a uniform prediction {uniform:.4g}; {rest}", loss=own, uniform=uniform)


def _uniform(subject: Subject) -> tuple[float, float, int] | None:
    """Return the mean cross entropy of the logits, that of a uniform prediction, and the number of classes."""
    found, logits = targets_of(subject.base), subject.base.logits
    if found is None or logits is None:
        return None
    wanted, used = found
    own = float(cross_entropy(logits[used].double(), wanted[used]))
    return own, log(logits.shape[-1]), logits.shape[-1]


def _ties(subject: Subject) -> Line | None:
    for name, module in subject.model.named_modules():
        config = getattr(module, "config", None)
        ends = [getattr(module, f"get_{side}_embeddings", None) for side in ("input", "output")]
        if not getattr(config, "tie_word_embeddings", False) or not all(map(callable, ends)):
            continue
        first, last = (getattr(end(), "weight", None) for end in ends if end is not None)
        if first is not None and last is not None and first is not last and first.shape == last.shape:
            where = f" of {name}" if name else ""
            return broken(f"the configuration{where} says tied embeddings, but input and output weights are two parameters")
    return None


def _unreached(subject: Subject) -> Line | None:
    if subject.still:
        return broken(f"the gradients of all {len(subject.parameters)} parameters are zero on this batch: nothing is trained")
    without = [name for name in subject.parameters if name not in subject.base.gradients]
    if not without:
        return None
    called = [name for name in without if (name.rpartition(".")[0] or "the model") in subject.base.calls]
    why = "its module is called, but the loss has no path to it" if called else "its module is never called"
    return broken(f"no gradient for {and_more(called + [n for n in without if n not in called])}: {why}", count=len(without))


def _optimizers(subject: Subject) -> Line | None:
    if not subject.optimizers:
        return None
    every = set().union(*subject.held)
    outside = [name for name, p in subject.parameters.items() if id(p) not in every]
    if outside:
        return broken(f"no optimizer holds {and_more(outside)}", count=len(outside))
    held = Counter(number for ids in subject.of_this_loss for number in ids)
    twice = [name for name, p in subject.parameters.items() if held[id(p)] > 1]
    return broken(f"two optimizers hold {and_more(twice)}", count=len(twice)) if twice else None


def _evaluation(subject: Subject, seen: Seen) -> Line | None:
    if not subject.guard.drawn():
        return None
    runs = [seen, subject.run(backward=False, evaluate=True, seed=1, outputs=True)]
    if relative(runs[0].loss, runs[1].loss) == 0 or not isfinite(runs[0].loss):
        return None
    where = f", first in {place}" if (place := subject.first_difference(runs[0], runs[1])) else ""
    if subject.draws and len({subject.run(backward=False, evaluate=True, seed=s, modes=Quiet()).loss for s in (1, 2)}) == 2:
        return by_design(f"evaluation draws random numbers as training does ({subject.draws}){where}")
    return broken(f"evaluation twice gives {runs[0].loss:.6g} and {runs[1].loss:.6g}: it draws random numbers{where}")
