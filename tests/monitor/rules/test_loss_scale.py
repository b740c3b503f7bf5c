"""The loss scale: searching and collapsing."""

from frames_by_hand import Bench


def test_a_loss_scale_that_is_searched_downwards_at_the_start_is_in_order():
    bench = Bench("loss_scale")
    for step in range(100):
        bench.feed(loss_scale=2.0 ** max(14, 32 - step))
    assert bench.found == []


def test_a_loss_scale_that_is_halved_step_by_step_later_collapses():
    bench = Bench("loss_scale")
    for step in range(80):
        bench.feed(loss_scale=65536.0 / 2 ** max(0, step - 49))
    assert [f.step for f in bench.found] == [55]


def test_a_loss_scale_below_one_is_a_collapse_at_once():
    assert len(Bench("loss_scale").feed(loss_scale=0.5)) == 1


def test_a_search_that_does_not_end_is_a_collapse():
    bench = Bench("loss_scale")
    for step in range(80):
        bench.feed(loss_scale=2.0 ** (100 - step))
    (found,) = bench.found
    assert (found.step, found.severity, found.site.name) == (32, "error", "loss_scale")
    assert "lower at each of 32 steps in a row" in found.message
