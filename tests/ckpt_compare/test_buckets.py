"""The geometry of the distributed optimizer's buckets against Megatron's own buffer."""

from __future__ import annotations

import pytest

from trainprobe.ckpt_compare.megatron_buckets import bucket_places, coalesced_starts, likely_buckets

SHAPES = [(7, 5), (48,), (64, 3), (1,), (130,)]


def as_megatron(shapes, limit, alone=()):
    """Return (start, bucket) of each parameter and the sizes of the buckets: the loop of `_ParamAndGradBuffer.__init__`."""
    places, sizes, at, bucket_start = {}, [], 0, 0
    for i in reversed(range(len(shapes))):
        count = 1
        for n in shapes[i]:
            count *= n
        at = -(-at // 64) * 64
        if i in alone and at > bucket_start:
            sizes.append(at - bucket_start)
            at = bucket_start = -(-at // 128) * 128
        places[i] = (len(sizes), at - bucket_start)
        at += count
        if i in alone or (limit is not None and at - bucket_start >= limit):
            sizes.append(at - bucket_start)
            at = bucket_start = -(-at // 128) * 128
    if at > bucket_start:
        sizes.append(at - bucket_start)
    return [places[i] for i in range(len(shapes))], sizes


@pytest.mark.parametrize("alone", [(), (0,), (0, 4)])
@pytest.mark.parametrize("limit", [None, 1, 100, 200])
def test_parameters_are_found_where_megatron_puts_them(limit, alone):
    places, sizes = as_megatron(SHAPES, limit, alone)
    assert bucket_places(SHAPES, sizes) == places


@pytest.mark.parametrize("limit", [None, 100])
def test_the_sizes_of_buckets_are_found_again_from_the_settings(limit):
    places, sizes = as_megatron(SHAPES, limit, (0,))
    shared = [True, *[False] * 4]
    starts = coalesced_starts(SHAPES, sum(sizes), likely_buckets(SHAPES, shared, {"bucket_size": limit}))
    assert starts == [sum(sizes[:b]) + at for b, at in places]


@pytest.mark.parametrize("sizes", [[], [1], [541], [540, 1], [130, 400]])
def test_buckets_that_the_parameters_do_not_fill_are_refused(sizes):
    assert bucket_places(SHAPES, sizes) is None
