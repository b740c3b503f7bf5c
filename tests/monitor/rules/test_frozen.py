"""Frozen parameters, and those that may stand still."""

import pytest
import torch
from frames_by_hand import Bench, grads, value, weight

import trainprobe


def test_a_parameter_with_a_gradient_that_does_not_move_is_frozen():
    bench = Bench("frozen", patience=5)
    for step in range(10):
        bench.feed(weight("a", 1.0), weight("b", 1.0 + step), *grads({"a": 0.1, "b": 0.1}), lr=1e-3)
    (found,) = bench.found
    assert (found.site.name, found.step) == ("a", 5)


@pytest.mark.parametrize(("gradient", "found"), [(1e-8, []), (1e-5, ["a"])])
def test_a_gradient_that_is_only_rounding_beside_the_others_need_not_move_a_parameter(gradient, found):
    bench = Bench("frozen", patience=5)
    for step in range(10):
        bench.feed(weight("a", 1.0), weight("b", 1.0 + step), *grads({"a": gradient, "b": 0.1}), lr=1e-3)
    assert [f.site.name for f in bench.found] == found


def test_a_parameter_without_a_gradient_is_frozen_on_purpose():
    bench = Bench("frozen", patience=5)
    for step in range(10):
        bench.feed(weight("a", 1.0), weight("b", 1.0 + step), *grads({"b": 0.1}))
    assert bench.found == []


def test_nothing_is_frozen_while_the_learning_rate_is_zero():
    bench = Bench("frozen", patience=5)
    for _ in range(10):
        bench.feed(weight("a", 1.0), *grads({"a": 0.1}), lr=0.0)
    assert bench.found == []


def test_the_fingerprint_decides_where_there_is_one():
    bench = Bench("frozen", patience=3)
    for step in range(8):
        bench.feed(
            value("forward", "parameter", "a", "value", norm=1.0, checksum=2**63 + step),
            value("forward", "parameter", "b", "value", norm=1.0, checksum=2**63),
            *grads({"a": 0.1, "b": 0.1}),
        )
    assert [f.site.name for f in bench.found] == ["b"]


def test_without_gradients_only_a_parameter_that_once_moved_can_be_frozen():
    bench = Bench("frozen", patience=4)
    for step in range(12):
        bench.feed(weight("never", 1.0), weight("stopped", 1.0 + min(step, 3)))
    assert [f.site.name for f in bench.found] == ["stopped"]


def test_a_weight_of_sixteen_bits_that_stands_still_is_said_to_round_away(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).bfloat16()
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with trainprobe.watch(model, optimizer, output=tmp_path, level="off", monitor=True, console=False) as probe:
        for _ in range(12):
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(6, 4, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
    (found,) = [f for f in probe.findings if f.rule == "frozen"]
    assert found.site.name == "weight"
    assert found.next.startswith("its numbers have 16 bits, in which a small update rounds away")
