"""A resumed run continues its schedule and its data where it left off.

Relation, after a load (`saved_and_loaded` identifies the save):

- No scheduler is behind its position at the save, or further ahead than the steps since the save allow.
- The loss scale of the next step is the saved one.
- The first batch is not that of the first audited step. Judged if the data of three or more steps is known and all differed.
- No random generator (torch, NumPy's global one, Python's) is in the state with which the run first began, if it had advanced
  by the time of the save.

If the number of ranks or the sharding has changed, rank 0 judges for all ranks at their next comparison. It then compares the
data of all ranks: no micro-batch may be among those of the first audited step. Micro-batches of a different size cannot be
recognised. Tolerance none. Equal random states are reported as info, because some trainers reseed. In a loop of the user's own
whose model draws from torch in training, they are a warning.
Usually caused by a scheduler that is missing from the checkpoint (the warm-up begins again), or that is loaded and then also
stepped to the same position. Other causes are a new data iterator (the first part of the data is seen twice, the last never),
a new scaler, and a script that seeds again and does not restore the saved random states.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import TrainingCalls
from trainprobe.monitor.audit.facts.saves import Save, Saves
from trainprobe.monitor.audit.facts.updates import SchedulerState, Schedules
from trainprobe.monitor.audit.resharded import Resharded, data_of_save, first_data, what_was_loaded
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"host"})
# saves are looked at where `saved_and_loaded` is checked
OBSERVERS = frozenset({"model_calls", "schedules"})
STAGE = "state"


def check(evidence: Evidence) -> list[Finding]:
    """Find schedules and data that begin again."""
    saved, resharded = evidence.resumed, evidence.resharded
    found: list[Finding] = []
    if saved is not None:
        found += _schedule(evidence, saved, evidence.of(Schedules).schedules)
        found += [*_data(evidence, saved), *_scale(evidence, saved), *_randoms(evidence, saved)] if resharded is None else []
    if resharded is not None and resharded.judgeable(evidence.peers):
        found += _over_layouts(evidence, resharded)
    return found


def _over_layouts(evidence: Evidence, resharded: Resharded) -> list[Finding]:
    """Judge on rank 0, which has read what was saved, what all ranks did first."""
    saved = what_was_loaded(resharded, evidence.peers)
    if saved is None:
        return []
    found = _schedule(evidence, saved, resharded.schedules or ())
    known = data_of_save(resharded, saved)
    if len(known) < 3 or len(frozenset().union(*(data for _, data in known))) < sum(len(data) for _, data in known):
        return found
    step, data = known[0]
    return [*found, *_begins_again(evidence, resharded.step, step)] if data & first_data(resharded, evidence.peers) else found


def _schedule(evidence: Evidence, saved: Save, schedules: Sequence[SchedulerState]) -> list[Finding]:
    for schedule in schedules:
        stood = saved.positions.get(schedule.kind)
        stands = schedule.position
        if stood is None or stood <= stands <= _farthest(evidence, saved, stood):
            continue
        again = "begins again" if stands < stood else "ran ahead"
        text = (
            f"the schedule {again}: {schedule.kind} is at {stands} after the load, and was at {stood} when it was "
            f"saved at step {saved.step}"
        )
        hint = "save and load the scheduler with the optimizer, and do not step it again to the position that it already has"
        return [
            evidence.found(
                text, "lr", next=hint, measured=float(stands), expected=float(stood), kind="scalar", severity="error"
            )
        ]
    return []


def _farthest(evidence: Evidence, saved: Save, stood: int) -> float:
    """Return the last position to which a scheduler can have come since the save, at the pace that it had until then."""
    since, pace = evidence.step - saved.step, max(1.0, stood / max(saved.step + 1, 1))
    return stood + since * pace if since > 0 else float("inf")  # steps are counted anew


def _scale(evidence: Evidence, saved: Save) -> list[Finding]:
    scale = scalar(evidence.scalars, "loss scale")
    if scale is None or saved.scale in (0.0, scale) or evidence.step != saved.step + 1 or not evidence.of(Saves).saved:
        return []
    text = (
        f"the loss scale is {scale:g} after the load, and was {saved.scale:g} when the scaler was saved at step {saved.step}. "
        "It was not loaded"
    )
    hint = "load the scaler's state dict with that of the optimizer"
    return [evidence.found(text, "loss_scale", next=hint, measured=scale, expected=saved.scale, kind="scalar")]


def _randoms(evidence: Evidence, saved: Save) -> list[Finding]:
    """Find generators that begin again."""
    saves = evidence.of(Saves)
    now = saves.randoms
    again = [name for name, (first, stood) in saved.randoms.items() if now.get(name) == first != stood]
    if not again or not saves.saved:
        return []
    text = (
        f"the random numbers begin again. At step {evidence.step}, after the load, the generator of "
        f"{' and that of '.join(again)} is in the state of the run's first step. It had advanced when step "
        f"{saved.step} was saved. Dropout, shuffles and augmentation repeat those of the first steps"
    )
    known = evidence.own_loop and evidence.of(TrainingCalls).drawn and "torch" in again
    hint = (
        "save the random states with the rest (torch.get_rng_state, numpy.random.get_state, random.getstate) and set them "
        "after the load, or seed with the step: torch.manual_seed(seed + step)"
    )
    return [
        evidence.found(
            text,
            f"random.{again[0]}",
            "input",
            next=hint,
            measured="as at the first step",
            expected="as when it was saved",
            kind="scalar",
            severity="warning" if known else "info",
        )
    ]


def _data(evidence: Evidence, saved: Save) -> list[Finding]:
    known = [batches for _, batches in saved.batches]
    now = evidence.batches
    if not evidence.of(Saves).saved or len(known) < 3 or len(set(known)) < len(known) or now != known[0]:
        return []
    return _begins_again(evidence, evidence.step, saved.batches[0][0])


def _begins_again(evidence: Evidence, step: int, first: int) -> list[Finding]:
    text = f"the data begins again: step {step} after the load trains on what step {first} trained on"
    hint = "save the position of the data iterator, or skip what was already seen"
    return [evidence.found(text, "batch", "input", next=hint, measured="equal", expected="different", kind="scalar")]
