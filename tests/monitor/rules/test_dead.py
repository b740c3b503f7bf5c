"""Dead outputs and gradients."""

import json
from pathlib import Path

import pytest
from frames_by_hand import Bench, grads, output, value

from tests.distributed.launch import launch
from trainprobe.monitor.judge_command import judged


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


def shards(norms: dict[str, float]) -> list[tuple]:
    """Return gradients of which this rank holds eight of sixteen elements."""
    return [value("backward", "parameter", name, "grad", norm=norm, count=8) for name, norm in norms.items()]


def test_a_lone_shard_without_gradient_is_dead_only_where_all_around_its_module_is():
    bench = Bench("dead", patience=3)
    for _ in range(5):
        bench.feed(
            *shards(
                {
                    "embed.weight": 0.0,
                    "mlp.up.weight": 0.0,
                    "mlp.down.weight": 0.0,
                    "experts.0.w": 0.0,
                    "experts.1.w": 2.0,
                    "off.weight": 0.0,
                    "off.bias": 0.0,
                }
            )
        )
    assert [f.names for f in bench.found] == [("mlp.up.weight", "mlp.down.weight", "off.weight", "off.bias")]


@pytest.mark.parametrize(("ranks", "dead"), [(1, True), (2, False)])
def test_a_csv_of_several_ranks_may_hold_shards(tmp_path, ranks, dead):
    """A file of metrics says the shape of the whole tensor and not what the rank holds of it."""
    for rank in range(ranks):
        rows = [
            f"{step},,{rank},parameter,{name},0,grad,norm,{norm},float32,[16 4],backward"
            for step in range(4)
            for name, norm in (("embed.weight", 0.0 if rank == ranks - 1 else 1.0), ("out.weight", 1.0))
        ]
        (tmp_path / f"rank{rank}").mkdir()
        head = "step,micro,rank,kind,name,call,slot,statistic,value,dtype,shape,phase"
        (tmp_path / f"rank{rank}" / "metrics.csv").write_text("\n".join([head, *rows]))
    (tmp_path / "rules.yaml").write_text("dead: {patience: 3}")
    found = judged(tmp_path, str(tmp_path / "rules.yaml")).findings
    assert [one.finding.site.name for one in found if one.finding.rule == "dead"] == (["embed.weight"] if dead else [])


@pytest.mark.slow
def test_rows_of_tokens_that_never_occur_are_no_dead_gradient_on_the_rank_that_holds_them(tmp_path):
    launch(Path(__file__).with_name("train_rows.py"), 2, str(tmp_path), timeout=120)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told == [[["off.bias", "off.weight"]]] * 2
    (tmp_path / "rules.yaml").write_text("dead: {patience: 3}")
    recorded = judged(tmp_path / "run", str(tmp_path / "rules.yaml"))
    assert {one.finding.names for one in recorded.findings if one.finding.rule == "dead"} == {("off.bias", "off.weight")}
