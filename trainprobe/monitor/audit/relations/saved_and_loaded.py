"""Loading restores the saved tensors under the same names.

Relation: the first update after a load begins with the weights and the optimizer state of one of the last saves, bit for bit
under the same names. The first forward pass begins with the buffers of the saved state dict. The save is identified by its
tensors: at least a quarter of them are here again, under whatever name (with Adam the weights are a third). Without such a save
(a fresh start, a different checkpoint) nothing is judged. Fingerprints are taken when an optimizer's state dict is taken, and
are kept next to the output for the process that resumes. If the sharding or the number of ranks was different, rank 0 compares
logical tensors (see `resharded`) at the next comparison of ranks, and reports what is missing for that. Tolerance zero.
Usually caused by state that is matched by position and not by name, by tensors that were left out or cast, or by weights that
are initialised after they were loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence, TensorsOfStep
from trainprobe.monitor.audit.facts.saves import Save, Saves
from trainprobe.monitor.audit.facts.updates import BufferStates
from trainprobe.monitor.audit.peers import Key
from trainprobe.monitor.audit.resharded import ENOUGH, Resharded, in_common, match, newest, saves_of_all

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"buffers", "saved_states"})
STAGE = "state"


def check(evidence: Evidence) -> list[Finding]:
    """Find tensors that did not come back, or came back at another place."""
    if evidence.resharded is not None and evidence.resharded.cut:
        return _over_layouts(evidence, evidence.resharded)
    saved = evidence.resumed
    if saved is None or not evidence.of(Saves).saved:
        return []
    buffers = {(name, "buffer"): fingerprint for name, fingerprint in evidence.of(BufferStates).begun.items()}
    known = set(evidence.tensors.names) | set(evidence.of(BufferStates).begun)
    tensors = {key: fingerprint for key, fingerprint in saved.tensors.items() if key[0] in known}
    return _compare(evidence, tensors, held(evidence.tensors) | buffers, f"at step {saved.step}")


def _compare(evidence: Evidence, saved: Mapping[Key, int], now: Mapping[Key, int], when: str) -> list[Finding]:
    wrong = [key for key, fingerprint in saved.items() if now.get(key) != fingerprint]
    if not wrong:
        return []
    name, slot = wrong[0]
    there = next((key for key, fingerprint in saved.items() if fingerprint == now.get(wrong[0])), None)
    if (name, slot) not in now:
        how = "it is missing"
    elif there is not None:
        how = f"it holds what was {there[1]} of {there[0]}"
    else:
        how = "its values differ, as it was left out, cast, or written to since"
    names = list(dict.fromkeys(key[0] for key in wrong))
    text = (
        f"{slot} of {and_more(names, len({key[0] for key in saved}))} did not come back as it was saved {when}. Now {how} "
        f"({len(wrong)} of {len(saved)} tensors)"
    )
    hint = "save and load by name, after all is initialised; `trainprobe ckpt-compare A B` compares two checkpoints"
    return [
        evidence.found(
            text,
            name,
            slot,
            next=hint,
            measured="another tensor" if (name, slot) in now else "absent",
            expected=f"as saved {when}",
            floor=0.0,
            severity="error",
            names=names,
        )
    ]


def came_back(saves: Sequence[Save], seen: TensorsOfStep) -> Save | None:
    """Return the save that was loaded, as far as the tensors tell: at least a quarter of it is there again."""
    now = held(seen)
    candidates = [(in_common(saved.tensors, now), saved) for saved in saves]
    share, saved = max(candidates, key=lambda pair: pair[0], default=(0.0, None))
    return saved if share >= ENOUGH else None


def held(seen: TensorsOfStep) -> dict[Key, int]:
    """Return the fingerprints of all that was there before the update, gradients left out."""
    return {key: checksum for key in seen.rows if (checksum := seen.checksum(*key)) is not None and not _is_new(key)}


def _over_layouts(evidence: Evidence, resharded: Resharded) -> list[Finding]:
    """Compare logical tensors, once the ranks have sent theirs; rank 0, which has read what was saved, does it for all."""
    if not resharded.saves or not resharded.judgeable(evidence.peers):
        return []
    if evidence.place.world_size > 1 and not evidence.peers:
        return _unjudged(
            evidence, "The ranks are not compared: set `ranks: true` in the plan's `audit`, and collect on all ranks"
        )
    saves = saves_of_all(resharded)
    if not saves:
        (step, world), there = newest(resharded)
        why = f"Of the {world} ranks that saved at step {step}, {there} left their fingerprints under this output"
        return _unjudged(evidence, f"{why}: have all ranks write to one folder that they share")
    best = match(saves, resharded, evidence.peers)
    if best is None:
        return _unjudged(evidence, "The pieces that the ranks told of do not make up whole tensors")
    step, world = best.moment
    when = f"at step {step} by {world} rank{'s' * (world > 1)} and loaded before step {resharded.step}"
    return _compare(evidence, best.saved, best.now, when) if best.share >= ENOUGH else []


def _unjudged(evidence: Evidence, why: str) -> list[Finding]:
    text = f"what was loaded is cut in another way than what was saved, and nothing of it was judged. {why}"
    hint = "`trainprobe ckpt-compare A B` compares the two checkpoints"
    return [evidence.found(text, next=hint)]


def _is_new(key: Key) -> bool:
    return key[1].endswith("_after") or key[1].startswith("grad")
