"""`weight_sync`: stamps what a trainer pushes to its rollout engine, and judges what arrived."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.core.findings import Finding
from trainprobe.engine.core.sources import Source
from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded, write_whole
from trainprobe.errors import FormatError, UsageError
from trainprobe.rollout.weights.arrival import Prints, Push, WeightArrival, judge_arrival
from trainprobe.rollout.weights.logical import held_pieces
from trainprobe.rollout.weights.prints import WeightPrint, as_json, fingerprints, from_json, joined, prints_of_pieces

Gather = Callable[[dict[str, WeightPrint]], Sequence[Mapping[str, WeightPrint]]]
MOST = 64  # pushes that are remembered
_known: weakref.WeakKeyDictionary[Any, list[Push]] = weakref.WeakKeyDictionary()
_engines: weakref.WeakKeyDictionary[Any, Prints] = weakref.WeakKeyDictionary()


@dataclass
class WeightSync:
    """One push, and those before it."""

    pushes: list[Push] = field(default_factory=list[Push])
    """The last of them is this one."""
    probe: Any = None
    """Whose run log has the push, or None."""

    def received(self, engine: Any, *, config: Mapping[str, Any] | None = None) -> WeightArrival:
        """Judge what an engine's model holds now. config: as of `fingerprints`, for an engine's model that does not say it.

        The engine's weights are read, which waits for its device. Raises UsageError before the push was stamped.
        """
        if not self.pushes:
            raise UsageError("received() was called inside of `with weight_sync(…)`: call it when the push is over")
        pieces = list(held_pieces(engine, None, config))
        answer = judge_arrival(self.pushes, pieces, _engines.get(engine))
        _engines[engine] = prints_of_pieces(pieces)
        if self.probe is not None:
            _log_arrival(self.probe, answer)
        return answer

    def write(self, path: str | Path) -> Path:
        """Write the pushes as a small file, which `read_sync` reads in the process of the engine. Raises OSError."""
        document = [{"version": push.version, "sent": as_json(push.sent)} for push in self.pushes]
        write_whole(Path(path), orjson.dumps(document))
        return Path(path)


def read_sync(path: str | Path) -> WeightSync:
    """Return the pushes of a file that `WeightSync.write` wrote. Raises FormatError for any other, OSError."""
    try:
        document = orjson.loads(read_bounded(Path(path), LARGEST_STATE))
        return WeightSync([Push(int(push["version"]), from_json(push["sent"])) for push in document])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path} holds no pushes of weights: {type(error).__name__}: {str(error)[:200]}") from None


@contextmanager
def weight_sync(
    model: Any,
    version: int,
    *,
    source: Source | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    gather: Gather | None = None,
    probe: Any = None,
) -> Generator[WeightSync]:
    """Stamp what the block pushes: the weights as they are when it ends.

        with trainprobe.weight_sync(model, version=step, dtype="bfloat16") as sync:
            push(model, engine)
        print(sync.received(engine_model).verdict.sentence)

    version: of the weights, which grows with each push. source, config, dtype: as of `fingerprints`. gather: hands the
    fingerprints of this rank to all and returns those of all ranks, such as by `all_gather_object`: 16 bytes a piece. probe:
    of `watch`, or the callback of a framework: the push becomes series `rollout/push_*` of its run log, which the rule
    `rollout` judges. A push between two steps stands with the one that follows.
    """
    sync = WeightSync(probe=watched(probe))
    yield sync
    own = fingerprints(model, source=source, config=config, dtype=dtype)
    sent = joined(gather(own)) if gather is not None else own
    earlier = _known.setdefault(model, [])
    earlier.append(Push(version, sent))
    del earlier[:-MOST]
    sync.pushes = list(earlier)
    if sync.probe is not None:
        _log_push(sync.probe, sync.pushes)


def watched(probe: Any) -> Any:
    """Return the probe that a user names by itself, by a session or by a framework's callback; None where none is open."""
    session = getattr(probe, "session", probe)
    return getattr(session, "probe", session)


def _log_push(probe: Any, pushes: Sequence[Push]) -> None:
    """Note the version of the last push, and the share of its tensors with other bits than the push before sent."""
    probe.note_soon("rollout/push_version", float(pushes[-1].version))
    if len(pushes) > 1:
        now, before = pushes[-1].sent, pushes[-2].sent
        same = sum(name in before and each.fingerprint == before[name].fingerprint for name, each in now.items())
        probe.note_soon("rollout/push_changed", 1 - same / max(1, len(now)))


def _log_arrival(probe: Any, answer: WeightArrival) -> None:
    """Note how many tensors did not arrive, and have the findings file say which."""
    lost = sum(fate.cause != "not comparable" for fate in answer.fates)
    probe.note_soon("rollout/push_lost", float(lost))
    if lost:
        probe.report_once(Finding("rollout", "info", answer.verdict.sentence, step=probe.step_number, place=probe.place))
