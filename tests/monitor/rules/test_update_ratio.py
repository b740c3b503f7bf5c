"""Updates that are too large or too small for their weights."""

from frames_by_hand import Bench, value, weight


def test_an_update_larger_than_its_weight_is_out_of_range():
    bench = Bench("update_ratio")
    for step in range(30):
        update = value("optimizer", "parameter", "w", "update", norm=0.001 if step < 20 else 3.0)
        bench.feed(weight("w", 1.0), update)
    (found,) = bench.found
    assert (found.site.name, found.measured) == ("w", 3.0)


def test_a_weight_whose_norm_leaps_is_out_of_range_even_where_updates_are_not_collected():
    bench = Bench("update_ratio")
    for step in range(30):
        bench.feed(weight("w", 1.0 if step < 20 else 3.0 ** (step - 19)))
    assert len(bench.found) == 1


def test_a_bias_or_a_single_number_is_not_judged_by_its_update_ratio():
    for shape, expected in (((4,), 0), ((1, 1), 0), ((1, 2), 1)):
        bench = Bench("update_ratio")
        for _ in range(30):
            bench.feed(weight("b", 1e-6, shape), value("optimizer", "parameter", "b", "update", shape, norm=1.0))
        assert len(bench.found) == expected


def test_an_update_that_vanishes_is_out_of_range_unless_the_learning_rate_is_zero():
    for rate, expected in ((1e-3, 1), (0.0, 0)):
        bench = Bench("update_ratio")
        for _ in range(80):
            bench.feed(weight("w", 1.0), value("optimizer", "parameter", "w", "update", norm=1e-12), lr=rate)
        assert len(bench.found) == expected
