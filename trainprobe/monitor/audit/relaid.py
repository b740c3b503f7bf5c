"""What was saved in one layout and loaded in another, set against each other as logical tensors.

Each rank tells the share of its piece in the fingerprint of the whole tensor; over pieces that cover it once the shares add up
(`engine.stats.checksum`). Those of the save lie beside the output. Those of the load are taken before the first update after it
and travel with the next message of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainprobe.engine.facts import Piece, SavedTensors
from trainprobe.engine.stats.checksum import MASK
from trainprobe.monitor.audit.evidence import Key, Peer
from trainprobe.monitor.audit.messages import key_of

Moment = tuple[int, int]  # step, number of ranks
_SHARE, _PLACE = "share that was loaded", "place that was loaded"


@dataclass(frozen=True, slots=True)
class Relaid:
    """What this rank held before the first update after a load, where that is cut in another way than what was saved.

    step: of that update. pieces: a tensor that is whole is the piece at place 0. saves: rank → its saves, on rank 0 alone.
    alone: no other rank will tell of its pieces.
    """

    step: int
    pieces: Mapping[Key, Piece]
    saves: Mapping[int, Sequence[SavedTensors]] = field(default_factory=dict[int, Sequence[SavedTensors]])
    alone: bool = False


def as_pieces(whole: Mapping[Key, int], cut: Mapping[Key, Piece]) -> dict[Key, Piece]:
    """Return all tensors as pieces. whole: key → fingerprint of what this rank holds of it."""
    return {key: cut.get(key, Piece(0, 0, 0, fingerprint)) for key, fingerprint in whole.items()}


def is_relaid(saved: SavedTensors | None, now: Mapping[Key, Piece]) -> bool:
    """Tell whether something is cut in another way now than when it was saved; True for a rank that saved nothing."""
    if saved is None:
        return True
    before = as_pieces(saved.tensors, saved.pieces)
    return any(piece.place != before[key].place for key, piece in now.items() if key in before)


def rows_of(relaid: Relaid) -> dict[int, tuple[int, float]]:
    """Return what a rank tells of it, as rows of its message."""
    rows: dict[int, tuple[int, float]] = {}
    for (name, slot), piece in relaid.pieces.items():
        rows[key_of(name, f"{slot} {_SHARE}")] = (piece.share, float(piece.count))
        rows[key_of(name, f"{slot} {_PLACE}")] = (piece.place, float(piece.whole))
    return rows


def loaded(keys: Iterable[Key], relaid: Relaid, peers: Sequence[Peer]) -> dict[Key, int | None]:
    """Return the logical fingerprints of these tensors, as `logical` does; those that nobody holds are left out.

    peers: the ranks that told; none: this one holds all.
    """
    if not peers:
        return {key: logical([piece]) for key, piece in relaid.pieces.items()}
    told: dict[Key, list[Piece]] = {}
    for name, slot in keys:
        share, place = key_of(name, f"{slot} {_SHARE}"), key_of(name, f"{slot} {_PLACE}")
        for peer in (peer for peer in peers if share in peer.rows and place in peer.rows):
            (number, count), (at, whole) = peer.rows[share], peer.rows[place]
            told.setdefault((name, slot), []).append(Piece(at, int(count), int(whole), number))
    return {key: logical(pieces) for key, pieces in told.items()}


def saves_of_all(relaid: Relaid) -> dict[Moment, dict[Key, int | None]]:
    """Return (step, ranks) → logical fingerprints, as `logical` does, of each save of which all ranks left theirs."""
    found: dict[Moment, dict[Key, int | None]] = {}
    for step, world in {(saved.step, saved.world) for saves in relaid.saves.values() for saved in saves}:
        of_ranks = [_saved_at((step, world), relaid.saves.get(rank, ())) for rank in range(world)]
        if None in of_ranks:
            continue
        told: dict[Key, list[Piece]] = {}
        for saved in of_ranks:
            for key, piece in as_pieces(saved.tensors, saved.pieces).items() if saved is not None else ():
                told.setdefault(key, []).append(piece)
        found[step, world] = {key: logical(pieces) for key, pieces in told.items()}
    return found


def newest(relaid: Relaid) -> tuple[Moment, int]:
    """Return the last save that is known of, (step, ranks), and how many ranks left their fingerprints of it."""
    moment = max((saved.step, saved.world) for saves in relaid.saves.values() for saved in saves)
    return moment, sum(_saved_at(moment, saves) is not None for saves in relaid.saves.values())


def _saved_at(moment: Moment, saves: Sequence[SavedTensors]) -> SavedTensors | None:
    return next((saved for saved in reversed(saves) if (saved.step, saved.world) == moment), None)


def logical(pieces: Sequence[Piece]) -> int | None:
    """Return the fingerprint of the tensor that pieces make up; None where they do not, or copies of one of them differ."""
    shares = {piece.place: piece for piece in pieces}
    if any(piece.share != shares[piece.place].share for piece in pieces):
        return None
    if 0 in shares:
        return shares[0].share if len(shares) == 1 else None
    covered, whole = sum(piece.count for piece in shares.values()), {piece.whole for piece in shares.values()}
    return sum(piece.share for piece in shares.values()) & MASK if whole == {covered} else None
