"""Data-parallel ranks and micro-batches train on different data, tensor-parallel ranks on the same data.

Relation: fingerprints of the model's inputs differ over dp (and cp) and between the micro-batches of a step. Integers (tokens)
agree over tp. A step does not repeat the data of the step before, a later pipeline stage does not repeat activations, and an
epoch of a shuffling `DistributedSampler` does not repeat the order of the one before. Tolerance none. Micro-batches or steps
that were equal before are taken as intended, unless a loader with several workers returned a different batch in between, or a
loader of several batches got a new iterator for each of the steps.
Usually caused by the same seed or sampler on all ranks (pytorch issue 56488), by a new iterator at each step, or by workers
that draw the same random numbers or each read a whole `IterableDataset` (pytorch issue 5059).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along, group_words
from trainprobe.monitor.audit.facts.calls import TrainingCalls

COST = frozenset({"ranks"})
OBSERVERS = frozenset({"loaders", "model_calls", "samplers", "updates"})
_REMEMBERED = 32  # audited steps whose data is remembered
STAGE = "data"
_LOOKS = 4
_KINDS = 3  # synthetic data may all be the same, but for the last batch of an epoch


@dataclass(frozen=True, slots=True)
class HandedOut:
    """What loaders with several workers have handed out."""

    batches: int = 0
    """How many, in the epochs that run now."""
    workers: int = 0
    """How many the last of these loaders has."""
    begun: int = 0
    """Iterators that were made of loaders with more than one batch."""


@dataclass(frozen=True, slots=True)
class RepeatedEpochs:
    """Epochs that a shuffling sampler began in the order of the one before."""

    count: int = 0
    """How many, since the last audited step."""


def check(evidence: Evidence) -> list[Finding]:
    """Find batches that are equal where they must differ, and the other way round."""
    stale = _stale(evidence)
    return [
        *_same_epochs(evidence),
        *_over(evidence, "dp"),
        *_over(evidence, "cp"),
        *_same_over_tp(evidence),
        *(stale or _micro(evidence)),
        *(_by_workers(evidence) or _made_anew(evidence) or _again(evidence)),
    ]


def _same_epochs(evidence: Evidence) -> list[Finding]:
    if not evidence.of(RepeatedEpochs).count:
        return []
    text = "a new epoch has the order of the one before: the DistributedSampler shuffles, and was not given the new epoch"
    return [_finding(evidence, text, severity="warning", next="call sampler.set_epoch(epoch) before each epoch")]


def _stale(evidence: Evidence) -> list[Finding]:
    """Find activations that a later pipeline stage is handed a second time: weights move, so no two are ever equal."""
    now, stage = evidence.batches, evidence.place.axes.get("pp", (0, 1))[0]
    earlier = {fingerprint for batches in _before(evidence) for fingerprint in batches}
    again = next((i for i, fingerprint in enumerate(now) if fingerprint in earlier or fingerprint in now[:i]), None)
    if not stage or again is None or evidence.of(TrainingCalls).whole_numbers:
        return []
    text = f"pipeline stage {stage} ran micro-batch {again} of step {evidence.step} on activations that it had received before"
    return [_finding(evidence, text, next="receive into a buffer of its own, and wait for it before the forward")]


def _over(evidence: Evidence, axis: str) -> list[Finding]:
    axes = frozenset({axis})
    group = along(evidence, axes)
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for peer in group:
        if peer.batches:
            ranks_of.setdefault(peer.batches, []).append(peer.rank)
    sharing = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), None)
    if sharing is None or not evidence.batches:
        return []
    if len(group) == evidence.place.world_size and _tensor_parallel_guess(evidence):
        return []
    text = (
        f"ranks {', '.join(map(str, sharing))} train on the same data "
        f"({group_words(evidence, axes, group)}): equal fingerprints of the batch"
    )
    hint = "give each rank data of its own: use a DistributedSampler, or a seed that contains the rank"
    if not evidence.assumed:
        return [_finding(evidence, text, next=hint)]
    text += ". The ranks are assumed to be data parallel, because nothing says which data they share"
    hint += "; or give the position of each rank: trainprobe.watch(..., place=Place(rank, world, {'tp': (rank, world)}))"
    return [_finding(evidence, text, severity="warning", next=hint)]


def _tensor_parallel_guess(evidence: Evidence) -> bool:
    """Tell whether some parameters differ over ranks that were only guessed to be replicas: they may share data on purpose.

    Of a DTensor that no data-parallel wrapper shards, the mesh alone does not say along which axis it is cut.
    """
    seen = evidence.tensors
    guessed = {name: over for name, over in evidence.replicated.items() if (name, "value") not in seen.replicas}
    declared = {name: over for (name, slot), over in seen.replicas.items() if slot == "value"} if evidence.assumed else {}
    return any("dp" not in over for name, over in (guessed | declared).items() if not name.startswith("buffer "))


def _same_over_tp(evidence: Evidence) -> list[Finding]:
    axes = frozenset({"tp"})
    group = [peer for peer in along(evidence, axes) if peer.batches and peer.marks["whole_numbers"]]
    if len({peer.batches for peer in group}) < 2:
        return []
    text = f"the {group_words(evidence, axes, group)} trains on different tokens, though it computes one model together"
    return [evidence.found(text, "batch", "input", measured="different", expected="equal", kind="scalar", severity="error")]


def remember(evidence: Evidence) -> tuple[tuple[int, ...], ...]:
    """Return the data of the last audited steps."""
    return (*_before(evidence), evidence.batches)[-_REMEMBERED:]


def _before(evidence: Evidence) -> tuple[tuple[int, ...], ...]:
    return evidence.remembered("distinct_data", ())


def _again(evidence: Evidence) -> list[Finding]:
    now, seen = evidence.batches, _before(evidence)
    if not now or not evidence.follows or len(seen) < 3 or now != seen[-1] or len(set(seen)) < len(seen):
        return []
    text = f"step {evidence.step} trains on the data of step {evidence.step - 1} again, though no step before did so"
    return [_finding(evidence, text)]


def _by_workers(evidence: Evidence) -> list[Finding]:
    """Find a batch that comes again though the loader has handed out another one, where not all batches are one."""
    loader = evidence.of(HandedOut)
    now, seen, before = evidence.batches, _before(evidence), evidence.before
    if before is None or not now or not evidence.follows or now != seen[-1] or len(set(seen)) < _KINDS:
        return []
    if not 0 < before.of(HandedOut).batches < loader.batches:
        return []
    text = (
        f"step {evidence.step} trains on the data of step {before.step} again, though a loader with {loader.workers} workers "
        "handed out another batch. The workers draw the same random numbers, or each reads all of the data"
    )
    hint = (
        "seed Python and NumPy in worker_init_fn from torch.initial_seed(); share out an IterableDataset by get_worker_info()"
    )
    return [_finding(evidence, text, severity="warning", next=hint)]


def _made_anew(evidence: Evidence) -> list[Finding]:
    """Find one batch at all of four audited steps, for each of which the loader was iterated anew."""
    now, seen, before = evidence.batches, _before(evidence), evidence.before
    if before is None or not now or len(seen) < _LOOKS - 1 or any(batches != now for batches in seen):
        return []
    if evidence.of(HandedOut).begun - before.of(HandedOut).begun < evidence.passed:
        return []
    text = (
        f"all of {len(seen) + 1} audited steps until step {evidence.step} train on the same batch, though the loader "
        "has several. A new iterator of it is made for each step, and begins with the same batch"
    )
    hint = "make the iterator once an epoch: for batch in loader"
    return [_finding(evidence, text, severity="warning", next=hint)]


def _micro(evidence: Evidence) -> list[Finding]:
    now = evidence.batches
    seen = [batches for batches in _before(evidence) if len(batches) > 1]
    if len(now) < 2 or len(set(now)) == len(now) or not seen or any(len(set(b)) < len(b) for b in seen):
        return []
    again = next(i for i, fingerprint in enumerate(now) if fingerprint in now[:i])
    text = f"micro-batch {again} is the same as micro-batch {now.index(now[again])} of this step"
    return [_finding(evidence, text)]


def _finding(evidence: Evidence, text: str, *, severity: str = "error", next: str | None = None) -> Finding:
    """Return the finding that data is equal which should differ."""
    about = (text, "batch", "input")
    return evidence.found(*about, next=next, measured="equal", expected="different", kind="scalar", severity=severity)
