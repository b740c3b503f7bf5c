"""Which tensors are replicas of each other, and the norm over the logical gradients, each element of the model counted once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from trainprobe.monitor.audit.evidence import TensorsOfStep
from trainprobe.monitor.audit.facts.model import ParameterFact
from trainprobe.monitor.audit.peers import GradientShare, Peer

_DATA = frozenset({"dp"})


def replicas_at_first(
    keys: Collection[int], axes: Collection[str], peers: Sequence[Peer], rank: int
) -> dict[int, frozenset[str]]:
    """Return key → axes over which all ranks hold the same tensor, as seen at the first comparison.

    A tensor is replicated over an axis when the ranks that differ from this one in that axis alone have its fingerprint. Axes
    along which no rank differs alone (experts lie across the data-parallel ranks) are asked together.
    """
    mine = next(peer for peer in peers if peer.rank == rank)
    found: dict[int, set[str]] = {key: set() for key in keys}
    lines = {axis: _line(peers, mine, axes, {axis}) for axis in axes}
    together = {axis for axis, line in lines.items() if len(line) == 1}
    asked = [({axis}, line) for axis, line in lines.items() if len(line) > 1]
    asked += [(together, _line(peers, mine, axes, together))] if together else []
    for over, line in asked:
        for key in keys:
            own = mine.rows.get(key, (0, 0.0))[0]
            if all(peer.rows.get(key, (None, 0.0))[0] == own for peer in line):
                found[key] |= over
    return {key: frozenset(over) for key, over in found.items()}


def _line(peers: Sequence[Peer], mine: Peer, axes: Collection[str], over: Collection[str]) -> list[Peer]:
    rest = [axis for axis in axes if axis not in over]
    return [peer for peer in peers if all(peer.axes.get(axis, 0) == mine.axes.get(axis, 0) for axis in rest)]


def with_known_shares(peers: Sequence[Peer], axes: Collection[str], certain: frozenset[str]) -> tuple[Peer, ...]:
    """Return the peers with every share's replicas known: declared, or learned from the values. certain: see `Audit`."""
    out: list[Peer] = []
    for peer in peers:
        unknown = {share.value for share in peer.gradients.values() if share.over is None}
        unknown |= {key for key, share in peer.gradients.items() if share.doubted}
        if unknown:
            learned = replicas_at_first(unknown, axes, peers, peer.rank)
            shares: Mapping[int, GradientShare] = {
                key: replace(s, over=_learned(key, s, learned) | (certain & frozenset(axes))) if s.over is None else s
                for key, s in peer.gradients.items()
            }
            peer = replace(peer, gradients=shares)
        out.append(peer)
    return tuple(out)


def _learned(key: int, share: GradientShare, learned: Mapping[int, frozenset[str]]) -> frozenset[str]:
    return learned[share.value] & learned[key] if share.doubted else learned[share.value]


def constants_with_matrices(parameters: Sequence[ParameterFact], seen: TensorsOfStep) -> dict[str, list[str]]:
    """Return name of each vector of one number throughout → matrices in the same module that have as many rows.

    Such a bias, all zeros at first, looks the same on ranks that split the matrix by its rows, each holding a part of it.
    """
    return {
        name: found
        for name, found in _vectors_with_matrices(parameters).items()
        if seen.number(name, "value", "min") == seen.number(name, "value", "max")
    }


def _vectors_with_matrices(parameters: Sequence[ParameterFact]) -> dict[str, list[str]]:
    matrices: dict[tuple[str, int], list[str]] = {}
    for p in parameters:
        if len(p.shape) > 1:
            matrices.setdefault((p.name.rpartition(".")[0], p.shape[0]), []).append(p.name)
    matrices_of = {p.name: matrices.get((p.name.rpartition(".")[0], p.shape[0]), []) for p in parameters if len(p.shape) == 1}
    return {name: found for name, found in matrices_of.items() if found}


def doubted_biases(
    parameters: Sequence[ParameterFact], learned: Mapping[str, frozenset[str]], axes: frozenset[str]
) -> frozenset[str]:
    """Return the vectors whose equal values do not show that they are replicated: a matrix in the same module is not.

    They may be all zeros, or drawn from one seed. learned: name → axes over which its value is the same.
    """
    matrices_of = _vectors_with_matrices(parameters)
    return frozenset(name for name, found in matrices_of.items() if any(axes - learned.get(m, axes) for m in found))


def logical_norms(peers: Sequence[Peer], axes: Collection[str], keys: Collection[int] | None = None) -> tuple[float, float]:
    """Return the norm of all gradients before and after clipping, √Σ‖g‖² over the unsharded model.

    Shares of one gradient whose ranks differ in replicated axes alone count as one, by their mean square; so do equal pieces
    on ranks that differ in `dp` (hybrid sharding: both dimensions of its mesh are data parallel). keys: only these gradients.
    """
    groups: dict[tuple[int, int, tuple[int, ...]], list[GradientShare]] = {}
    for peer in peers:
        for key, share in peer.gradients.items():
            if keys is None or key in keys:
                over = (share.over or frozenset()) | (_DATA if share.piece else frozenset())
                place = tuple(-1 if axis in over else peer.axes.get(axis, 0) for axis in axes)
                groups.setdefault((key, share.piece, place), []).append(share)
    before = sum(sum(s.unclipped**2 for s in shares) / len(shares) for shares in groups.values())
    after = sum(sum(s.clipped**2 for s in shares) / len(shares) for shares in groups.values())
    return float(before**0.5), float(after**0.5)
