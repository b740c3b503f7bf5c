"""Nothing that works on PyTorch is silently nothing under MindSpore: the table of `docs/mindspore.md` is what was tried."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.mindspore import support
from tests.mindspore.tiny import GRAPH, PYNATIVE
from tests.monitor.audit.read_facts import facts_read
from trainprobe.cli import main
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import PlanError, UsageError
from trainprobe.integrations.mindspore_limits import WITHOUT_EFFECT, not_judged
from trainprobe.integrations.mindspore_probe import MindSporeProbe
from trainprobe.monitor.audit import relations
from trainprobe.monitor.plan import MonitorPlan
from trainprobe.rollout.save import SingleSave
from trainprobe.watching import watch

# what a MindSpore training fills of the facts that are read off by their class
FILLED = {
    *(f"TrainingCalls.{name}" for name in ("batches", "whole_numbers", "tokens", "evaluations")),
    *("Backwards.count", "UpdateCounts.updates", "UpdateCounts.once", "UsedGroups.groups", "UsedGroups.rates"),
    "RandomFingerprints.ended",
}


def test_every_field_of_a_plan_is_in_the_table() -> None:
    tried = {name.partition(":")[0] for name in (*support.CALLS, *support.ANYWHERE)} | {*WITHOUT_EFFECT}
    assert {*Plan.model_fields} <= tried
    kinds = {name.split(": ")[1] for name in (*support.CALLS, *support.ANYWHERE) if name.startswith("monitor: ")}
    assert {*MonitorPlan.model_fields} - {"step", "rules", "actions"} <= kinds


def test_the_table_is_what_was_tried() -> None:
    _, written, _ = support.split(support.DOC.read_text(encoding="utf-8"))
    assert written == support.table()


def test_commands_read_what_a_mindspore_training_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"level": "mix", "monitor": True, "config_check": True, "sinks": ["dump", "parquet", "csv"]}
    plan["csv_layout"] = "wide"
    places = {"root": str(tmp_path)}
    for side in ("a", "b"):
        support.run(PYNATIVE, tmp_path / side, plan)
        places[side] = str(tmp_path / side)
    places["plan"] = str(tmp_path / "plan.json")
    Path(places["plan"]).write_text(json.dumps(plan))
    places["classic"], places["weights"] = (str(tmp_path / name) for name in ("c.json", "w.ckpt"))
    Path(places["classic"]).write_text(json.dumps({"task": "statistics", "dump_path": "d", "level": "L0"}))
    ms.save_checkpoint(support.Small(), places["weights"])
    for words in support.COMMANDS_RUN:
        assert main([word.format(**places) for word in words]) == 0, (words, capsys.readouterr())


def test_a_relation_that_reads_nothing_that_mindspore_shows_is_not_called_judged() -> None:
    for path in Path(relations.__file__).parent.glob("[a-z]*.py"):
        text = path.read_text(encoding="utf-8")
        module = importlib.import_module(f"{relations.__name__}.{path.stem}")
        read = {word for word in facts_read(module) if "." in word}
        if read and not read & FILLED and "evidence.tensors" not in text and "scalars" not in text:
            assert path.stem in not_judged(), f"{path.stem} reads {read}, which MindSpore does not show"


def test_calls_that_only_pytorch_has_are_refused(tmp_path: Path) -> None:
    with MindSporeProbe(output=str(tmp_path / "out")) as probe:
        with pytest.raises(UsageError, match="no loss can be declared"):
            probe.declare_loss(lambda model: 0)
        with pytest.raises(PlanError, match="a plan stays while a run goes on"):
            probe.change(step=[3])
        with pytest.raises(AttributeError):
            probe.no_such_name  # noqa: B018
    with pytest.raises(PlanError, match="per_micro: the optimizer is handed gradients that are reduced"):
        MindSporeProbe(output=str(tmp_path / "out"), monitor={"gradients": {"per_micro": True}})


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
def test_watch_takes_a_cell_and_changes_no_bit(mode: int, tmp_path: Path) -> None:
    ms.set_context(mode=mode)

    def trained(watched: bool) -> list[bytes]:
        ms.set_seed(5)
        net = support.Small()
        optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-2)

        def forward(x):
            return ms.ops.ReduceMean()(net(x))

        gradients = ms.value_and_grad(forward, None, optimizer.parameters)
        x = ms.Tensor([[1.0, 2.0, 3.0]], ms.float32)
        if not watched:
            for _ in range(3):
                optimizer(gradients(x)[1])
        else:
            plan = {"level": "mix", "task": "tensor", "monitor": True, "audit": {"every": 1}, "on_error": "raise"}
            with watch(net, optimizer, output=str(tmp_path / "out"), **plan) as probe:
                for _ in range(3):
                    with probe.step():
                        optimizer(gradients(x)[1])
            assert [finding.message for finding in probe.findings if finding.severity != "info"] == []
        return [p.asnumpy().tobytes() for p in net.get_parameters()]

    assert trained(True) == trained(False)


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
def test_single_save_keeps_tensors_of_mindspore(mode: int, tmp_path: Path) -> None:
    ms.set_context(mode=mode)
    value = ms.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    SingleSave(tmp_path / "rl", fmk="mindspore")
    SingleSave.save({"response": value, "reward": ms.Tensor([0.5], ms.bfloat16)})
    SingleSave.step()
    SingleSave.close()
    found = {path.name: np.load(path) for path in sorted((tmp_path / "rl").rglob("*.npy"))}
    assert sorted((a.tolist() for a in found.values()), key=len) == [[0.5], value.asnumpy().tolist()]
