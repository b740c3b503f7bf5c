"""What a rank tells the others at the end of an audited step, as 64-bit words, and back.

words 0 …      rank, step, counts; then NUMBERS as the bits of float64, MARKS, the axes, the batches
rows           three words each: key, fingerprint, bits of the norm
projections    two words each: key, bits of the number
gradients      six words each: key, key of the value, axes of its replicas as bits, bits of both norms, digest of the piece
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trainprobe.engine.core.gathering import Payload
from trainprobe.engine.core.topology import AXES as _AXES
from trainprobe.monitor.audit.peers import GradientShare, Peer

AXES = (*_AXES, "etp")
NUMBERS = (
    "lr",
    "loss_scale",
    "counter",
    "reported_norm",
    "coefficient",
    "loss",
    "updates",
    "tokens",
    "differentiated",
)
MARKS = ("modes", "trainable", "random", "drawn", "whole_numbers", "region", "out")
_COUNTS = ("rank", "step", "batches", "rows", "projections", "gradients")
_UNKNOWN = 1 << 63  # it is not known yet over which axes it is replicated
_DOUBTED = 1 << 62  # equal values alone would not show it
_HEAD = len(_COUNTS) + len(NUMBERS) + len(MARKS) + len(AXES)
Rows = dict[int, tuple[int, float]]  # key → fingerprint and a number


@lru_cache(maxsize=1 << 16)
def key_of(name: str, slot: str) -> int:
    """Return the 64-bit key of a tensor, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(f"{name}\0{slot}".encode(), digest_size=8).digest(), "little")


def digest(text: str) -> int:
    """Return a 64-bit digest of a text."""
    return key_of(text, "digest")


def encode(peer: Peer, step: int) -> Payload:
    """Return a rank's message."""
    head = [peer.rank, step, len(peer.batches), len(peer.rows), len(peer.projections), len(peer.gradients)]
    head += [_bits(peer.numbers.get(name, float("nan"))) for name in NUMBERS]
    head += [peer.marks.get(name, 0) for name in MARKS]
    head += [peer.axes.get(axis, 0) for axis in AXES]
    rows = [word for key, (checksum, norm) in peer.rows.items() for word in (key, checksum, _bits(norm))]
    projections = [word for key, number in peer.projections.items() for word in (key, _bits(number))]
    shares = [
        word
        for key, s in peer.gradients.items()
        for word in (key, s.value, _axes_bits(s.over) | _DOUBTED * s.doubted, _bits(s.unclipped), _bits(s.clipped), s.piece)
    ]
    return np.array([*head, *peer.batches, *rows, *projections, *shares], dtype=np.uint64)


def decode(words: Payload) -> tuple[Peer, int]:
    """Return what `encode` was given: the peer, and the step that it is at."""
    flat = [int(word) for word in words]
    rank, step, batches, rows, projections, gradients = flat[: len(_COUNTS)]
    at = len(_COUNTS)
    numbers = {name: _number(flat[at + i]) for i, name in enumerate(NUMBERS)}
    at += len(NUMBERS)
    marks = {name: flat[at + i] for i, name in enumerate(MARKS)}
    at += len(MARKS)
    axes = {axis: flat[at + i] for i, axis in enumerate(AXES)}
    at = _HEAD
    batches_seen = tuple(flat[at : at + batches])
    at += batches
    table = {flat[i]: (flat[i + 1], _number(flat[i + 2])) for i in range(at, at + 3 * rows, 3)}
    at += 3 * rows
    products = {flat[i]: _number(flat[i + 1]) for i in range(at, at + 2 * projections, 2)}
    at += 2 * projections
    shares = {flat[i]: _share(flat[i + 1 : i + 6]) for i in range(at, at + 6 * gradients, 6)}
    return Peer(rank, axes, numbers, marks, batches_seen, table, products, shares), step


def out_of_service(rank: int, step: int) -> Payload:
    """Return the message of a rank whose audit has stopped: the others must not wait for it in vain."""
    return encode(Peer(rank, {}, {}, {"out": 1}, (), {}, {}), step)


def _axes_bits(over: frozenset[str] | None) -> int:
    return _UNKNOWN if over is None else sum(1 << i for i, axis in enumerate(AXES) if axis in over)


def _share(words: Sequence[int]) -> GradientShare:
    value, bits, unclipped, clipped, piece = words
    over = None if bits & _UNKNOWN else frozenset(axis for i, axis in enumerate(AXES) if bits >> i & 1)
    return GradientShare(value, over, _number(unclipped), _number(clipped), bool(bits & _DOUBTED), piece)


def _bits(number: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]
