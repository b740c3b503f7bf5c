"""What a rank tells the others at the end of an audited step, as 64-bit words, and back.

words 0 …      rank, step, counts; then NUMBERS as the bits of float64, MARKS, the axes, the batches
rows           three words each: key, fingerprint, bits of the norm
projections    two words each: key, bits of the number
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trainprobe.engine.topology import AXES
from trainprobe.monitor.audit.evidence import Peer

NUMBERS = ("lr", "loss_scale", "counter", "reported_norm", "unclipped", "clipped", "coefficient", "loss", "updates")
MARKS = ("modes", "trainable", "random", "drawn", "whole_numbers", "out")
_COUNTS = ("rank", "step", "batches", "rows", "projections")
_HEAD = len(_COUNTS) + len(NUMBERS) + len(MARKS) + len(AXES)
Words = npt.NDArray[np.uint64]


@lru_cache(maxsize=1 << 16)
def key_of(name: str, slot: str) -> int:
    """Return the 64-bit key of a tensor, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(f"{name}\0{slot}".encode(), digest_size=8).digest(), "little")


def digest(text: str) -> int:
    """Return a 64-bit digest of a text."""
    return key_of(text, "digest")


def encode(peer: Peer, step: int) -> Words:
    """Return a rank's message."""
    head = [peer.rank, step, len(peer.batches), len(peer.rows), len(peer.projections)]
    head += [_bits(peer.numbers.get(name, float("nan"))) for name in NUMBERS]
    head += [peer.marks.get(name, 0) for name in MARKS]
    head += [peer.axes.get(axis, 0) for axis in AXES]
    rows = [word for key, (checksum, norm) in peer.rows.items() for word in (key, checksum, _bits(norm))]
    told = [word for key, number in peer.projections.items() for word in (key, _bits(number))]
    return np.array([*head, *peer.batches, *rows, *told], dtype=np.uint64)


def decode(words: Words) -> tuple[Peer, int]:
    """Return what `encode` was given: the peer, and the step that it is at."""
    flat = [int(word) for word in words]
    rank, step, batches, rows, projections = flat[: len(_COUNTS)]
    at = len(_COUNTS)
    numbers = {name: _number(flat[at + i]) for i, name in enumerate(NUMBERS)}
    at += len(NUMBERS)
    marks = {name: flat[at + i] for i, name in enumerate(MARKS)}
    at += len(MARKS)
    axes = {axis: flat[at + i] for i, axis in enumerate(AXES)}
    at = _HEAD
    told = tuple(flat[at : at + batches])
    at += batches
    table = {flat[i]: (flat[i + 1], _number(flat[i + 2])) for i in range(at, at + 3 * rows, 3)}
    at += 3 * rows
    products = {flat[i]: _number(flat[i + 1]) for i in range(at, at + 2 * projections, 2)}
    return Peer(rank, axes, numbers, marks, told, table, products), step


def out_of_service(rank: int, step: int) -> Words:
    """Return the message of a rank whose audit has stopped: the others must not wait for it in vain."""
    return encode(Peer(rank, {}, {}, {"out": 1}, (), {}, {}), step)


def replicas_at_first(
    names: Sequence[str], slot: str, axes: Mapping[str, tuple[int, int]], peers: Sequence[Peer], rank: int
) -> dict[str, frozenset[str]]:
    """Return parameter → axes over which all ranks hold the same value, as seen at the first comparison.

    A parameter is replicated over an axis when the ranks that differ from this one in that axis alone have its fingerprint.
    """
    by_rank = {peer.rank: peer for peer in peers}
    mine = by_rank[rank]
    found: dict[str, set[str]] = {name: set() for name in names}
    for axis, (_, size) in axes.items():
        if size < 2:
            continue
        line = [p for p in peers if all(p.axes.get(a, 0) == i for a, (i, _) in axes.items() if a != axis)]
        for name in names:
            key = key_of(name, slot)
            seen = [peer.rows.get(key, (None, 0.0))[0] for peer in line]
            if all(checksum == mine.rows.get(key, (0, 0.0))[0] for checksum in seen):
                found[name].add(axis)
    return {name: frozenset(over) for name, over in found.items()}


def _bits(number: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]
