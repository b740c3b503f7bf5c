"""What was saved in one layout and loaded in another, set against each other as logical tensors.

Each rank tells the share of its piece in the fingerprint of the whole tensor; over pieces that cover it once the shares add up
(`engine.stats.checksum`). Those of the save lie next to the output. Those of the load are taken before the first update after
it and travel with the next message of the ranks, and with them what data that update was made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainprobe.engine.geometry.shards import SavedShard
from trainprobe.engine.stats.checksum import MASK
from trainprobe.monitor.audit.facts.saves import Save
from trainprobe.monitor.audit.facts.updates import SchedulerState
from trainprobe.monitor.audit.messages import key_of
from trainprobe.monitor.audit.peers import Key, Peer

Moment = tuple[int, int]  # step, number of ranks
ENOUGH = 0.25  # of the tensors of a save: then it is what was loaded
_SHARE, _PLACE, _DATA = "share that was loaded", "place that was loaded", "first data after the load"


@dataclass(frozen=True, slots=True)
class Resharded:
    """What this rank held before the first update after a load, where ranks or cuts are others than when it was saved.

    step: of that update. pieces: a tensor that is whole is the piece at place 0. cut: something is cut in another way. saves:
    rank → its saves, on rank 0 alone. alone: no other rank will send its pieces. batches: fingerprints of the data of that
    update. schedules: as they stood when they were first seen, None before that; empty where they were judged already.
    """

    step: int
    pieces: Mapping[Key, SavedShard]
    cut: bool = True
    saves: Mapping[int, Sequence[Save]] = field(default_factory=dict[int, Sequence[Save]])
    alone: bool = False
    batches: tuple[int, ...] = ()
    schedules: tuple[SchedulerState, ...] | None = None

    def judgeable(self, peers: Sequence[Peer]) -> bool:
        """Tell whether every rank that sends has sent: `peers` are those that did, none if ranks were not compared."""
        return bool(peers) or self.alone


class Match(NamedTuple):
    """The save that was loaded, the logical fingerprints of it that can be judged, and those of what is there now."""

    moment: Moment
    saved: Mapping[Key, int]
    now: Mapping[Key, int]
    share: float  # of the saved tensors that are there again, at whatever place


def as_pieces(whole: Mapping[Key, int], cut: Mapping[Key, SavedShard]) -> dict[Key, SavedShard]:
    """Return all tensors as pieces. whole: key → fingerprint of what this rank holds of it."""
    return {key: cut.get(key, SavedShard(0, 0, 0, fingerprint)) for key, fingerprint in whole.items()}


def is_resharded(saved: Save | None, now: Mapping[Key, SavedShard]) -> bool:
    """Tell whether something is cut in another way now than when it was saved; True for a rank that saved nothing."""
    if saved is None:
        return True
    before = as_pieces(saved.tensors, saved.pieces)
    return any(piece.place != before[key].place for key, piece in now.items() if key in before)


def rows_of(resharded: Resharded) -> dict[int, tuple[int, float]]:
    """Return what a rank sends of it, as rows of its message."""
    rows: dict[int, tuple[int, float]] = {}
    for (name, slot), piece in resharded.pieces.items():
        rows[key_of(name, f"{slot} {_SHARE}")] = (piece.share, float(piece.count))
        rows[key_of(name, f"{slot} {_PLACE}")] = (piece.place, float(piece.whole))
    for number, batch in enumerate(resharded.batches):
        rows[key_of(str(number), _DATA)] = (batch, 0.0)
    return rows


def first_data(resharded: Resharded, peers: Sequence[Peer]) -> frozenset[int]:
    """Return the fingerprints of all data of the first update after the load, over the ranks that sent theirs."""
    fingerprints = set(resharded.batches)
    for peer in peers:
        number = 0
        while (row := peer.rows.get(key_of(str(number), _DATA))) is not None:
            fingerprints.add(row[0])
            number += 1
    return frozenset(fingerprints)


def loaded(keys: Iterable[Key], resharded: Resharded, peers: Sequence[Peer]) -> dict[Key, int | None]:
    """Return the logical fingerprints of these tensors, as `logical` does; those that no rank holds are left out.

    peers: the ranks that sent theirs; none: this one holds all.
    """
    if not peers:
        return {key: logical([piece]) for key, piece in resharded.pieces.items()}
    found_pieces: dict[Key, list[SavedShard]] = {}
    for name, slot in keys:
        share, place = key_of(name, f"{slot} {_SHARE}"), key_of(name, f"{slot} {_PLACE}")
        for peer in (peer for peer in peers if share in peer.rows and place in peer.rows):
            (number, count), (at, whole) = peer.rows[share], peer.rows[place]
            found_pieces.setdefault((name, slot), []).append(SavedShard(at, int(count), int(whole), number))
    return {key: logical(pieces) for key, pieces in found_pieces.items()}


def saves_of_all(resharded: Resharded) -> dict[Moment, dict[Key, int | None]]:
    """Return (step, ranks) → logical fingerprints, as `logical` does, of each save of which all ranks left theirs."""
    found: dict[Moment, dict[Key, int | None]] = {}
    for step, world in {(saved.step, saved.world) for saves in resharded.saves.values() for saved in saves}:
        of_ranks = [_saved_at((step, world), resharded.saves.get(rank, ())) for rank in range(world)]
        if None in of_ranks:
            continue
        found_pieces: dict[Key, list[SavedShard]] = {}
        for saved in of_ranks:
            for key, piece in as_pieces(saved.tensors, saved.pieces).items() if saved is not None else ():
                found_pieces.setdefault(key, []).append(piece)
        found[step, world] = {key: logical(pieces) for key, pieces in found_pieces.items()}
    return found


def match(saves: Mapping[Moment, Mapping[Key, int | None]], resharded: Resharded, peers: Sequence[Peer]) -> Match | None:
    """Return the save of `saves_of_all` that most is there of again; None where no tensor can be judged."""
    found = loaded({key for saved in saves.values() for key in saved}, resharded, peers)
    now = {key: fingerprint for key, fingerprint in found.items() if fingerprint is not None}
    judged = {moment: _judgeable(saved, found) for moment, saved in saves.items()}
    matches = [Match(moment, saved, now, in_common(saved, now)) for moment, saved in judged.items() if saved]
    return max(matches, key=lambda m: m.share, default=None)


def what_was_loaded(resharded: Resharded, peers: Sequence[Peer]) -> Save | None:
    """Return rank 0's part of the save that was loaded; None where that is unknown, as on all other ranks."""
    best = match(saves_of_all(resharded), resharded, peers) if resharded.saves else None
    return None if best is None or best.share < ENOUGH else _saved_at(best.moment, resharded.saves[0])


def data_of_save(resharded: Resharded, saved: Save) -> list[tuple[int, frozenset[int]]]:
    """Return (step, fingerprints of its data on all ranks) of each step whose data was remembered when this was saved."""
    seen: dict[int, set[int]] = {}
    for saves in resharded.saves.values():
        of_rank = _saved_at((saved.step, saved.world), saves)
        for step, batches in of_rank.batches if of_rank is not None else ():
            seen.setdefault(step, set()).update(batches)
    return [(step, frozenset(batches)) for step, batches in sorted(seen.items())]


def _judgeable(saved: Mapping[Key, int | None], found: Mapping[Key, int | None]) -> dict[Key, int]:
    """Leave out what no fingerprint is known of, parameters that are not there, and master weights where there are none now."""
    known = {name for name, _ in found}
    return {
        key: fingerprint
        for key, fingerprint in saved.items()
        if fingerprint is not None
        and key[0] in known
        and found.get(key, 0) is not None
        and (key[1] != "main_value" or key in found)
    }


def in_common(saved: Mapping[Key, int], now: Mapping[Key, int]) -> float:
    """Return which share of the saved tensors, of those that there is only one of, is there now at whatever place."""
    counted = Counter(saved.values())
    single = [fingerprint for fingerprint, count in counted.items() if count == 1]
    present = set(now.values())
    return sum(fingerprint in present for fingerprint in single) / len(single) if single else 0.0


def newest(resharded: Resharded) -> tuple[Moment, int]:
    """Return the last save that is known of, (step, ranks), and how many ranks left their fingerprints of it."""
    moment = max((saved.step, saved.world) for saves in resharded.saves.values() for saved in saves)
    return moment, sum(_saved_at(moment, saves) is not None for saves in resharded.saves.values())


def _saved_at(moment: Moment, saves: Sequence[Save]) -> Save | None:
    return next((saved for saved in reversed(saves) if (saved.step, saved.world) == moment), None)


def logical(pieces: Sequence[SavedShard]) -> int | None:
    """Return the fingerprint of the tensor that pieces make up; None where they do not, or copies of one of them differ."""
    shares = {piece.place: piece for piece in pieces}
    if any(piece.share != shares[piece.place].share for piece in pieces):
        return None
    if 0 in shares:
        return shares[0].share if len(shares) == 1 else None
    covered, whole = sum(piece.count for piece in shares.values()), {piece.whole for piece in shares.values()}
    return sum(piece.share for piece in shares.values()) & MASK if whole == {covered} else None
