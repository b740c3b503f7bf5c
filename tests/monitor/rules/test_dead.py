"""Dead outputs and gradients."""

from frames_by_hand import Bench, grads, output


def test_an_output_of_zeros_is_dead_after_its_patience():
    bench = Bench("dead", patience=5)
    for step in range(12):
        bench.feed(output("relu", 1.0, 0.5 if step < 3 else 1.0), output("other", 1.0, 0.9))
    (found,) = bench.found
    assert (found.site.name, found.step) == ("relu", 7)


def test_a_gradient_of_exactly_zero_is_dead_and_a_tiny_one_is_not():
    bench = Bench("dead", patience=3)
    for _ in range(5):
        bench.feed(*grads({"gone": 0.0, "tiny": 1e-30}))
    assert [f.site.name for f in bench.found] == ["gone"]


def test_where_no_parameter_has_a_gradient_that_is_said_and_not_one_of_them_blamed():
    bench = Bench("dead", patience=3)
    for _ in range(4):
        bench.feed(output("relu", 1.0, 0.5), *grads({"a.weight": 0.0, "b.weight": 0.0}))
    (found,) = bench.found
    assert found.message == "the gradients of all 2 parameters have been zero at 3 collected steps in a row"
    assert "the loss" in found.next
