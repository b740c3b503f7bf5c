"""`mindspore.train.Model` with the callback: bits, numbers, findings, and nothing left behind."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint
from safetensors.numpy import load_file

from tests.mindspore.launch import ENVIRONMENT
from tests.mindspore.tiny import BATCH, GRAPH, PYNATIVE, STEPS, Data, Loss, Net, train
from trainprobe.engine.core.records import Record
from trainprobe.errors import PlanError
from trainprobe.integrations.mindformers import ProbeCallback

ALL = {"optimizer_state": True, "update": True, "activation_gradients": True}
ASYNCHRONOUS = (
    *("test_no_bit_changes", "test_output_gradients_are_those_of_a_framework_hook"),
    *("test_a_nan_is_found_at_the_cell_where_it_is_born", "test_the_default_plan_says_one_line_and_trains_the_same"),
)


class Keep:
    """Keeps the records of each step, as the writers get them."""

    def __init__(self, callback: ProbeCallback) -> None:
        self.steps: dict[int, list[Record]] = {}
        ends = callback.session.step_ends

        def step_ends() -> Any:
            stop = ends()
            step_data = callback.session.step_data
            if step_data is not None:
                self.steps[step_data.step] = list(step_data.records())
            return stop

        callback.session.step_ends = step_ends  # type: ignore[method-assign]


def watched(mode: int, output: Path, plan: dict[str, Any], **how: Any) -> tuple[Any, ProbeCallback, dict[int, list[Record]]]:
    callback = ProbeCallback({"output": str(output), "on_error": "raise", "stacks": False, **plan})
    keep = Keep(callback)
    return train(mode, [callback], **how), callback, keep.steps


@pytest.mark.proves("MindSpore", "Model in PyNative and in graph mode")
@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
@pytest.mark.parametrize(
    "plan", [{"level": "off", "monitor": ALL}, {"level": "L0", "task": "tensor", "monitor": ALL}], ids=["monitor", "dump"]
)
def test_no_bit_changes(mode: int, plan: dict[str, Any], tmp_path: Path) -> None:
    bare = train(mode)
    before = nn.Cell.__call__
    on, callback, steps = watched(mode, tmp_path / "out", plan)
    assert on.bits == bare.bits
    assert on.numbers == list(steps) == [1, 2, 3, 4]
    assert nn.Cell.__call__ is before
    assert "torch" not in sys.modules
    assert [finding for finding in callback.findings if finding.severity != "info"] == []


def test_every_step_differs_so_that_equal_bits_mean_something() -> None:
    bare = train(PYNATIVE)
    other = train(PYNATIVE, make_optimizer=lambda net: nn.AdamWeightDecay(net.trainable_params(), 1.0001e-2))
    assert len(set(bare.losses)) == STEPS
    assert bare.weights != other.weights
    assert bare.losses[0] == other.losses[0]


def numbers(records: list[Record], slot: str) -> dict[str, Record]:
    return {record.site.name: record for record in records if record.site.kind == "parameter" and record.site.slot == slot}


@pytest.mark.proves("MindSpore", "real gradients and moments")
def test_gradients_and_moments_are_those_that_mindspore_holds(tmp_path: Path) -> None:
    held = train(PYNATIVE, hold=True).held
    _, _, steps = watched(PYNATIVE, tmp_path / "out", {"level": "off", "monitor": ALL})
    for number, step in enumerate(held, start=1):
        seen: dict[tuple[str, str], Record] = {}
        for record in steps[number]:
            if record.site.kind == "parameter":
                seen[record.site.slot, record.site.name] = record
        assert {slot for slot, _ in seen} >= {"grad", "value", "value_after", "exp_avg", "exp_avg_after", "exp_avg_sq_after"}
        for key, array in step.items():
            slot, _, name = key.partition("|")
            check(seen[slot, name], array)
        for name in [key.partition("|")[2] for key in step if key.startswith("grad|")]:
            check(seen["update", name], step[f"value_after|{name}"] - step[f"value|{name}"])


def check(record: Record, array: np.ndarray) -> None:
    wide = array.astype(np.float64)
    assert record.shape == array.shape
    assert record.values["max"] == wide.max()
    assert record.values["min"] == wide.min()
    assert record.values["mean"] == pytest.approx(wide.mean(), rel=1e-12, abs=1e-15)
    assert record.values["norm"] == pytest.approx(float(np.sqrt((wide**2).sum())), rel=1e-12)


def test_output_gradients_are_those_of_a_framework_hook(tmp_path: Path) -> None:
    found: list[dict[str, np.ndarray]] = []

    def prepare(net: Any) -> None:
        def backward(name: str) -> Any:
            def see(cell: Any, grad_output: Any) -> None:
                if name == "blocks.1":  # the first that backward reaches
                    found.append({})
                found[-1][name] = grad_output[0].asnumpy().copy()

            return see

        for name, cell in net.cells_and_names():
            if name in ("blocks.1", "blocks.0.up", "embed"):
                cell.register_backward_pre_hook(backward(name))

    train(PYNATIVE, prepare=prepare)
    assert [sorted(step) for step in found] == [["blocks.0.up", "blocks.1", "embed"]] * STEPS
    _, _, steps = watched(PYNATIVE, tmp_path / "out", {"level": "L0"})
    for number, step in enumerate(found, start=1):
        seen = {r.site.name: r for r in steps[number] if r.site.kind == "module" and r.site.slot == "grad_output.0"}
        assert len(seen) == 15
        for name, array in step.items():
            check(seen[name], array)


def test_nothing_is_in_place_in_a_step_that_is_not_collected(tmp_path: Path) -> None:
    before = nn.Cell.__call__
    replaced: dict[int, bool] = {}

    class Looks(Callback):
        def on_train_step_begin(self, run_context: Any) -> None:
            replaced[int(run_context.original_args().cur_step_num)] = nn.Cell.__call__ is not before

    plan = {"output": str(tmp_path / "out"), "level": "L0", "step": [2, 3], "stacks": False}
    train(PYNATIVE, [ProbeCallback(plan), Looks()])
    assert replaced == {1: False, 2: True, 3: True, 4: False}


def test_recomputed_cells_keep_their_names_and_numbers(tmp_path: Path) -> None:
    def repeat(net: Any) -> None:
        for block in net.blocks:
            block.recompute()

    bare = train(PYNATIVE, prepare=repeat)
    on, _, steps = watched(PYNATIVE, tmp_path / "on", {"level": "L0"}, prepare=repeat)
    assert on.bits == bare.bits
    plain, skipping = (
        watched(PYNATIVE, tmp_path / w, {"level": "L0", "recompute": w}, prepare=p)[2]
        for w, p in (("mark", None), ("skip", repeat))
    )
    for number, records in plain.items():
        want = {address(r): r.values for r in records}
        seen = {address(r): r.values for r in steps[number] if r.step.phase != "recompute"}
        repeated = {address(r): r.values for r in steps[number] if r.step.phase == "recompute"}
        assert set(seen) == set(want)
        assert {address(r) for r in skipping[number]} == set(want)
        assert "blocks.0.up" in {name for name, *_ in repeated}
        assert all(values == seen[where] for where, values in repeated.items())


def address(record: Record) -> tuple[str, str, int]:
    return record.site.name, record.site.slot, record.site.call


def test_a_dump_holds_the_values_and_names_cells(tmp_path: Path) -> None:
    values: dict[str, np.ndarray] = {}

    def prepare(net: Any) -> None:
        def see(cell: Any, args: Any, out: Any) -> None:
            values.setdefault("in", args[0].asnumpy().copy())
            values.setdefault("out", out.asnumpy().copy())

        net.blocks[0].up.register_forward_hook(see)

    train(PYNATIVE, prepare=prepare)
    watched(PYNATIVE, tmp_path / "out", {"level": "L0", "task": "tensor", "step": [1]})
    folder = tmp_path / "out/step1/rank0"
    dump = json.loads((folder / "dump.json").read_text())
    assert dump["framework"] == "mindspore"
    entry = dump["data"]["Cell.blocks.0.up.Dense.forward.0"]
    assert entry["input_args"][0]["type"] == "mindspore.Tensor"
    assert entry["input_args"][0]["dtype"] == "Float32"
    stored = load_file(folder / "tensors.safetensors")
    assert stored[entry["input_args"][0]["data_name"]].tobytes() == values["in"].tobytes()
    assert stored[entry["output"][0]["data_name"]].tobytes() == values["out"].tobytes()
    assert not (tmp_path / "out/step2").exists()


def test_a_graph_hides_what_is_inside_and_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainprobe.integrations.mindformers._print_line", lambda line: sys.stderr.write(f"{line}\n"))
    _, callback, steps = watched(GRAPH, tmp_path / "out", {"level": "off", "monitor": ALL})
    said = capfd.readouterr().err
    assert said.count("MindSpore compiles this model into a graph") == 1
    assert "MS_JIT=0" in said
    assert [finding.rule for finding in callback.findings] == ["mindspore"]
    held = train(PYNATIVE, hold=True).held
    for number, step in enumerate(held, start=1):
        slots = {record.site.slot for record in steps[number] if record.site.kind == "parameter"}
        assert "grad" not in slots
        for slot in ("value", "value_after", "exp_avg_after", "exp_avg_sq_after"):
            seen = numbers(steps[number], slot)
            assert len(seen) == 15
            for name, record in seen.items():
                assert record.values["norm"] == pytest.approx(
                    float(np.linalg.norm(step[f"{slot}|{name}"].astype(float))), rel=1e-4
                )


def scalars(records: list[Record]) -> dict[str, float]:
    return {record.site.name: float(record.values["value"]) for record in records if record.site.kind == "scalar"}


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
def test_loss_scale_and_skipped_steps_are_as_reported(mode: int, tmp_path: Path) -> None:
    """A network in float32 with a loss scale that overflows: MindSpore leaves those updates out and halves the scale."""
    bare = train(mode, around=Scaled)
    on, _, steps = watched(mode, tmp_path / "out", {"level": "off", "monitor": {"optimizer_state": True}}, around=Scaled)
    assert on.bits == bare.bits
    seen = {number: scalars(records) for number, records in steps.items()}
    reported = [[seen[n][name] for name in ("loss", "step_skipped", "loss_scale")] for n in sorted(seen)]
    assert reported == bare.reports
    assert [skipped for _, skipped, _ in reported] == [1.0, 0.0, 0.0, 0.0]
    assert reported[-1][2] == 2.0**107
    if mode == PYNATIVE:
        for number, told in seen.items():
            slots = {record.site.slot for record in steps[number] if record.site.kind == "parameter"}
            assert ("grad" in slots) == (told["step_skipped"] == 0.0)


class Scaled(nn.TrainOneStepWithLossScaleCell):
    """MindSpore's own cell; an overflow is told as devices with infinities tell it, for there is no CPU kernel of the flag."""

    def __init__(self, network: Any, optimizer: Any) -> None:
        super().__init__(network, optimizer, nn.DynamicLossScaleUpdateCell(2.0**127, 2**20, 100))
        self.ascend_910b_target = True
        self.enable_allfinite = False


def test_the_rate_of_a_schedule_is_the_one_in_use(tmp_path: Path) -> None:
    rates = [0.04, 0.03, 0.02, 0.01]

    def scheduled(net: Any) -> Any:
        return nn.Momentum(net.trainable_params(), rates, 0.9)

    on, _, steps = watched(PYNATIVE, tmp_path / "out", {"level": "off", "monitor": ALL}, make_optimizer=scheduled)
    assert on.bits == train(PYNATIVE, make_optimizer=scheduled).bits
    assert [scalars(steps[n])["lr"] for n in (1, 2, 3, 4)] == [float(np.float32(rate)) for rate in rates]
    assert len(numbers(steps[4], "momentum_buffer_after")) == 15


def test_a_frozen_parameter_is_found_and_named(tmp_path: Path) -> None:
    def all_but_one(net: Any) -> Any:
        kept = [p for p in net.trainable_params() if p.name != "blocks.1.up.weight"]
        return nn.AdamWeightDecay([{"params": kept}, {"params": [net.blocks[1].up.weight], "lr": 0.0}], 1e-2)

    plan = {"level": "off", "monitor": {"rules": {"frozen": {"patience": 3}}}}
    _, callback, _ = watched(PYNATIVE, tmp_path / "out", plan, make_optimizer=all_but_one, epochs=2)
    frozen = [finding for finding in callback.findings if finding.rule == "frozen"]
    assert [finding.site.name for finding in frozen if finding.site is not None] == ["blocks.1.up.weight"]


def test_a_nan_is_found_at_the_cell_where_it_is_born(tmp_path: Path) -> None:
    class Breaks(Callback):
        def __init__(self) -> None:
            self.net: Any = None

        def on_train_step_end(self, run_context: Any) -> None:
            if run_context.original_args().cur_step_num == 2:
                weight = self.net.blocks[1].up.weight
                broken = weight.asnumpy().copy()
                broken[0, 0] = np.nan
                weight.set_data(ms.Tensor(broken))

    breaks = Breaks()
    callback = ProbeCallback({"output": str(tmp_path / "out"), "level": "off", "monitor": True, "on_error": "raise"})
    train(PYNATIVE, [callback, breaks], prepare=lambda net: setattr(breaks, "net", net))
    first = next(finding for finding in callback.findings if finding.rule == "nonfinite")
    assert first.step == 3
    assert "blocks.1.up" in first.message


def test_a_rule_may_stop_the_training(tmp_path: Path) -> None:
    plan = {"level": "off", "monitor": {"rules": {"threshold": {"actions": ["alert", "stop"], "high": 0.0, "names": ["loss"]}}}}
    on, callback, _ = watched(PYNATIVE, tmp_path / "out", plan)
    assert on.numbers == [1]
    assert callback.findings[0].rule == "threshold"


@pytest.mark.proves("MindSpore", "several callbacks")
def test_two_callbacks_and_one_added_twice(tmp_path: Path) -> None:
    first, second = (ProbeCallback({"output": str(tmp_path / name), "level": "L0", "stacks": False}) for name in "ab")
    before = nn.Cell.__call__
    on = train(PYNATIVE, [first, second, first])
    assert on.bits == train(PYNATIVE).bits
    assert nn.Cell.__call__ is before
    texts = [(tmp_path / name / f"step{STEPS}/rank0/dump.json").read_text().replace(str(tmp_path / name), "") for name in "ab"]
    assert texts[0] == texts[1]


@pytest.mark.proves("MindSpore", "a second training")
def test_a_second_training_goes_on_in_the_folder_with_the_frameworks_numbers(tmp_path: Path) -> None:
    callback = ProbeCallback({"output": str(tmp_path / "out"), "level": "off", "monitor": True, "sinks": ["jsonl"]})
    train(PYNATIVE, [callback])
    train(PYNATIVE, [callback], epochs=2, first_epoch=1)
    rows = (tmp_path / "out/rank0/records.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.proves("MindSpore", "resume")
def test_what_rules_remember_goes_with_the_frameworks_checkpoints(tmp_path: Path) -> None:
    """A weight that stands still for six steps, of which four lie before a checkpoint from which another process goes on."""

    def stands_still(net: Any) -> Any:
        kept = [p for p in net.trainable_params() if p.name != "blocks.1.up.weight"]
        return nn.AdamWeightDecay([{"params": kept}, {"params": [net.blocks[1].up.weight], "lr": 0.0}], 1e-2)

    plan = {
        "output": str(tmp_path / "out"),
        "level": "off",
        "monitor": {"rules": {"frozen": {"patience": 6}}},
        "on_existing": "continue",
    }
    saves = ModelCheckpoint("tiny", str(tmp_path / "saved"), CheckpointConfig(save_checkpoint_steps=2))
    first = ProbeCallback(plan)
    train(PYNATIVE, [first, saves], make_optimizer=stands_still)
    assert [finding.rule for finding in first.findings if finding.rule == "frozen"] == []
    folder = tmp_path / "out/rank0"
    assert sorted(path.name for path in folder.glob("rules_step*.json")) == ["rules_step2.json", "rules_step4.json"]
    (folder / "monitor_state.json").unlink()  # as if the process had been killed: only what went with a checkpoint is left
    second = ProbeCallback(plan)
    train(PYNATIVE, [second], make_optimizer=stands_still, epochs=2, first_epoch=1)
    whole = ProbeCallback({**plan, "output": str(tmp_path / "whole")})
    train(PYNATIVE, [whole], make_optimizer=stands_still, epochs=2)
    told = [[f.step for f in callback.findings if f.rule == "frozen"] for callback in (second, whole)]
    assert told == [[7], [7]]


def test_evaluation_is_left_out(tmp_path: Path) -> None:
    ms.set_context(mode=PYNATIVE)
    ms.set_seed(1)
    net = Net()
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-2)
    model = Model(net, Loss(), optimizer, metrics={"loss"})
    data, other = (GeneratorDataset(Data(seed=s), ["x", "y"], shuffle=False).batch(BATCH) for s in (1, 2))
    callback = ProbeCallback({"output": str(tmp_path / "out"), "level": "L0", "stacks": False})
    keep = Keep(callback)
    model.fit(2, data, other, callbacks=[callback], dataset_sink_mode=False, valid_dataset_sink_mode=False)
    assert list(keep.steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    for records in keep.steps.values():
        assert {record.site.call for record in records if record.site.kind == "module"} == {0}


def test_callbacks_are_copied_and_pickled_as_what_they_were_made_of(tmp_path: Path) -> None:
    callback = ProbeCallback({"level": "off", "monitor": True}, output=str(tmp_path / "elsewhere"))
    twin = pickle.loads(pickle.dumps(callback))
    assert twin.session.plan == callback.session.plan


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        ({"level": "L0", "ops_scope": "core"}, "ops_scope"),
        ({"level": "L0", "histogram": "exponent"}, "histogram"),
    ],
)
def test_what_only_pytorch_shows_is_refused_when_training_begins(plan: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=word):
        train(PYNATIVE, [ProbeCallback({**plan, "output": str(tmp_path)})])


def test_the_default_plan_says_one_line_and_trains_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    on = train(PYNATIVE, [ProbeCallback()])
    assert on.bits == train(PYNATIVE).bits
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("trainprobe: watching")]
    assert len(lines) == 1
    assert "15 parameters" in lines[0]
    assert (tmp_path / "probe_out/rank0/metrics-000000.parquet").exists()


@pytest.mark.proves("MindSpore", "a script that is not edited")
def test_a_program_that_knows_nothing_of_the_probe_is_watched(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import mindspore as ms\nms.set_device('CPU')\nfrom tests.mindspore.tiny import PYNATIVE, train\ntrain(PYNATIVE)\n"
    )
    subprocess.run(
        [sys.executable, "-m", "trainprobe", "run", "default", "--", str(script)],
        check=True,
        timeout=180,
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
    )
    assert (tmp_path / "probe_out/rank0/metrics-000000.parquet").exists()


def test_the_example_shows_what_it_says(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "mindspore_model.py"
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 findings; step 1 in full in probe_out/step1" in done.stdout
