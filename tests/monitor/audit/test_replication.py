"""The norm over logical gradients and who holds what, from messages made by hand."""

from __future__ import annotations

import pytest

from trainprobe.monitor.audit.evidence import TensorsOfStep
from trainprobe.monitor.audit.facts.model import ParameterFact
from trainprobe.monitor.audit.messages import decode, encode
from trainprobe.monitor.audit.peers import GradientShare, Peer
from trainprobe.monitor.audit.replication import (
    constants_with_matrices,
    doubted_biases,
    logical_norms,
    replicas_at_first,
    with_known_shares,
)

DENSE, EXPERT = frozenset({"dp", "ep"}), frozenset({"dp"})


def peer(
    rank: int, axes: dict[str, int], shares: dict[int, GradientShare], rows: dict[int, tuple[int, float]] | None = None
) -> Peer:
    marks = dict.fromkeys(("modes", "trainable", "random", "drawn", "whole_numbers", "out"), 0)
    return Peer(rank, axes, {}, marks, (7, 8), rows or {}, {5: 0.25}, shares)


def test_experts_that_lie_across_the_data_parallel_ranks_count_once_each():
    """Two ranks on dp and ep at once: the dense gradient of norm 3 is one, the experts' (4 and 12) are two."""
    ranks = [
        peer(
            r,
            {"dp": r, "ep": r},
            {1: GradientShare(2, DENSE, 3.0, 1.5), 10 + r: GradientShare(20 + r, EXPERT, expert, expert / 2)},
        )
        for r, expert in enumerate((4.0, 12.0))
    ]
    assert logical_norms(ranks, {"dp", "ep"}) == pytest.approx((13.0, 6.5))


def test_pieces_that_a_distributed_optimizer_cuts_add_up():
    ranks = [peer(r, {"dp": r}, {1: GradientShare(2, frozenset(), norm, norm)}) for r, norm in enumerate((3.0, 4.0))]
    assert logical_norms(ranks, {"dp"}) == pytest.approx((5.0, 5.0))


def test_replicas_of_pieces_count_once_where_both_lie_on_the_data_parallel_axis():
    """Two replicas of what two ranks shard; the messages carry which piece is whose."""
    norms = (3.0, 4.0)
    ranks = [
        peer(r, {"dp": r}, {1: GradientShare(2, frozenset(), norms[r % 2], norms[r % 2], piece=5 + r % 2)}) for r in range(4)
    ]
    assert logical_norms([decode(encode(rank, 7))[0] for rank in ranks], {"dp"}) == pytest.approx((5.0, 5.0))


def test_a_tied_weight_on_the_first_and_the_last_of_three_stages_counts_once():
    shares = {0: {1: GradientShare(2, frozenset({"pp"}), 3.0, 3.0)}, 1: {4: GradientShare(5, frozenset(), 4.0, 4.0)}}
    ranks = [peer(r, {"pp": r}, shares.get(r % 2, {})) for r in range(3)]
    assert logical_norms(ranks, {"pp"}) == pytest.approx((5.0, 5.0))


def test_what_nobody_told_is_learned_from_equal_values_at_once():
    """At the very first comparison: key 2 is equal on both ranks, key 3 is not."""
    ranks = [
        peer(
            r,
            {"dp": r},
            {10: GradientShare(2, None, 3.0, 3.0), 11: GradientShare(3, None, 4.0, 4.0)},
            {2: (99, 1.0), 3: (r, 1.0)},
        )
        for r in range(2)
    ]
    known = with_known_shares(ranks, {"dp"}, frozenset())
    assert [share.over for share in known[0].gradients.values()] == [frozenset({"dp"}), frozenset()]
    assert logical_norms(known, {"dp"}) == pytest.approx(((9 + 16 + 16) ** 0.5,) * 2)


def test_axes_along_which_no_rank_differs_alone_are_asked_together():
    ranks = [peer(r, {"dp": r, "ep": r}, {}, {1: (5, 0.0), 2: (r, 0.0)}) for r in range(2)]
    assert replicas_at_first([1, 2], {"dp", "ep"}, ranks, 0) == {1: DENSE, 2: frozenset()}


def test_a_message_comes_back_as_it_was_sent():
    shares = {1: GradientShare(2, frozenset({"tp", "etp"}), 0.5, 0.25), 3: GradientShare(4, None, 1.0, 1.0)}
    sent = peer(3, {"dp": 1, "etp": 1}, shares, {9: (1 << 63, -0.0)})
    back, step = decode(encode(sent, 17))
    assert step == 17
    assert (back.rank, back.batches, back.rows, back.projections, back.gradients) == (
        3, (7, 8), sent.rows, sent.projections, shares,
    )  # fmt: skip
    assert {axis: index for axis, index in back.axes.items() if index} == {"dp": 1, "etp": 1}


class Numbers(TensorsOfStep):
    """The numbers of a few tensors, of which all but those in `constant` vary."""

    def __init__(self, constant):
        object.__setattr__(self, "constant", constant)

    def number(self, name, slot, statistic):
        return 0.0 if name in self.constant or statistic == "min" else 1.0


def fact(name, *shape):
    return ParameterFact((name,), 0, 0, True, shape, "float32")


SPLIT = [fact("mlp.up", 8, 4), fact("mlp.up_bias", 8), fact("mlp.down_bias", 4), fact("ln.weight", 8), fact("fc.weight", 8, 2)]


def test_a_constant_bias_beside_a_matrix_of_as_many_rows_may_be_a_part():
    seen = Numbers({"mlp.up_bias", "mlp.down_bias", "ln.weight"})
    assert constants_with_matrices(SPLIT, seen) == {"mlp.up_bias": ["mlp.up"]}
    assert constants_with_matrices(SPLIT, Numbers(set())) == {}


def test_it_is_doubted_where_that_matrix_is_split_and_else_not():
    axes = frozenset({"tp"})
    assert doubted_biases(SPLIT, {"mlp.up": frozenset()}, axes) == {"mlp.up_bias"}
    assert doubted_biases(SPLIT, {"mlp.up": axes}, axes) == frozenset()


@pytest.mark.parametrize(("gradients", "over"), [((5, 5), {"tp"}), ((5, 6), set())])
def test_a_doubted_share_is_replicated_only_where_the_gradients_are_equal_too(gradients, over):
    ranks = [
        peer(r, {"tp": r}, {10: GradientShare(2, None, 3.0, 3.0, doubted=True)}, {2: (99, 1.0), 10: (gradients[r], 3.0)})
        for r in range(2)
    ]
    told = [decode(encode(rank, 0))[0] for rank in ranks]
    assert [share.over for share in with_known_shares(told, {"tp"}, frozenset())[0].gradients.values()] == [frozenset(over)]
