"""Save and load give the same tensors at the same places.

Relation: the first update after a load begins with the weights and the optimizer state of one of the last saves, each tensor
bit for bit under the name that it had. Which save it is follows from the tensors: one of which at least a quarter is there
again, at whatever place (of Adam's training the weights are a third); where there is none (a fresh start, another checkpoint)
nothing is judged. Fingerprints are taken when an optimizer's state dict is, and lie beside the output for the process that
resumes. Where another number of ranks saved, that is said and nothing judged. Tolerance zero. Usually caused by state that is
matched by position and not by name, by tensors that were left out or cast on the way, or by weights that are initialised after
they were loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainprobe.engine.facts import SavedTensors
from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, Key, Tensors, and_more

COST = frozenset({"fingerprints"})
EVERY = 10
STAGE = "state"


def check(evidence: Evidence) -> list[Finding]:
    """Find tensors that did not come back, or came back at another place."""
    seen, saved = evidence.tensors, evidence.resumed
    if saved is None or not evidence.facts.saved:
        return _of_another_world(evidence)
    now = _held(seen)
    wrong = [key for key, fingerprint in saved.tensors.items() if now.get(key) != fingerprint and key[0] in set(seen.names)]
    if not wrong:
        return []
    name, slot = wrong[0]
    there = next((key for key, fingerprint in saved.tensors.items() if fingerprint == now.get(wrong[0])), None)
    if (name, slot) not in now:
        how = "it is not there"
    elif there is not None:
        how = f"there is what was {there[1]} of {there[0]}"
    else:
        how = "it is another tensor: left out, cast, or written to since"
    names = list(dict.fromkeys(key[0] for key in wrong))
    text = (
        f"{slot} of {and_more(names, len(seen.names))} did not come back as it was saved at step {saved.step}: {how} "
        f"({len(wrong)} of {len(saved.tensors)} tensors)"
    )
    return [
        evidence.finding(
            "saved_and_loaded",
            text,
            name,
            slot,
            measured="another tensor" if (name, slot) in now else "absent",
            expected=f"as saved at step {saved.step}",
            floor=0.0,
            next="save and load by name, and load after everything is initialised; `trainprobe ckpt` compares checkpoints",
        )
    ]


def came_back(saves: Sequence[SavedTensors], seen: Tensors) -> SavedTensors | None:
    """Return the save that was loaded, as far as the tensors tell: at least a quarter of it is there again."""
    now = _held(seen)
    candidates = [(_in_common(saved, now), saved) for saved in saves]
    share, saved = max(candidates, key=lambda pair: pair[0], default=(0.0, None))
    return saved if share >= 0.25 else None


def _of_another_world(evidence: Evidence) -> list[Finding]:
    """Say that nothing was judged where the tensors were cut for another number of ranks."""
    worlds = {saved.world for saved in evidence.facts.saved} - {evidence.place.world_size}
    if not worlds:
        return []
    text = (
        f"what was saved by {max(worlds)} ranks is not judged on {evidence.place.world_size}: each rank holds other pieces; "
        "`trainprobe ckpt` compares the checkpoints"
    )
    return [evidence.finding("saved_and_loaded", text, severity="info")]


def _held(seen: Tensors) -> dict[Key, int]:
    return {key: checksum for key in seen.rows if (checksum := seen.checksum(*key)) is not None and not _is_new(key)}


def _is_new(key: Key) -> bool:
    return key[1].endswith("_after") or key[1].startswith("grad")


def _in_common(saved: SavedTensors, now: dict[Key, int]) -> float:
    """Return which share of the saved tensors, of those that there is only one of, is there now at whatever place."""
    counted = Counter(saved.tensors.values())
    single = [fingerprint for fingerprint, count in counted.items() if count == 1]
    present = set(now.values())
    return sum(fingerprint in present for fingerprint in single) / len(single) if single else 0.0
