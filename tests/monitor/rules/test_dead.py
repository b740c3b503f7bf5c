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
