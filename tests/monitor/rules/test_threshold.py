"""Values that leave fixed limits."""

import math

from frames_by_hand import Bench, grads


def test_a_value_beyond_its_threshold_fires_once_until_it_is_back():
    bench = Bench("threshold", limit=10.0)
    for x in (1.0, 11.0, 12.0, 1.0, math.inf):
        bench.feed(*grads({"w": x}))
    assert [f.step for f in bench.found] == [1, 4]


def test_limits_below_and_above_can_be_given_for_a_scalar():
    bench = Bench("threshold", limit=None, low=0.5, high=2.0, names="loss")
    for x in (1.0, 0.4, 1.0, 2.1):
        bench.feed(loss=x, other=99.0)
    assert [f.step for f in bench.found] == [1, 3]
