"""Deeper features in a watched training: no bit changes, nothing is left or done when off, and every writer has them."""

from __future__ import annotations

import csv
import functools

import numpy as np
import pytest
import torch
from small_training import GPT, batch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import trainprobe
from tests import zoo
from tests.engine.stats.exponents import exponent_histogram
from tests.lockstep import differences, one_step, seed_all
from tests.lockstep import train as train_case
from tests.traces import left_behind, traces
from trainprobe.engine.capture import Tap
from trainprobe.engine.core.findings import in_folder
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.stats.low_precision import lost
from trainprobe.errors import PlanError
from trainprobe.monitor.feature_plan import AttentionSettings, Features, FormatSettings
from trainprobe.monitor.plan import make_rules, validate
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import judge_frames
from trainprobe.run.composition import compose
from trainprobe.run.torch_taps import TorchTaps

torch.set_num_threads(1)
ALL = {
    "attention": True,
    "weights": True,
    "routers": True,
    "formats": {"formats": ["fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "fp16", "bf16"]},
    "dead_units": {"names": "**"},
    "loss_rows": True,
}


def watching(folder, level="off", **monitor):
    plan = {"level": level, "sinks": ["parquet"], "monitor": {"features": ALL, "batches": True, "collectives": True, **monitor}}
    return lambda model, optimizer: trainprobe.watch(model, optimizer, output=folder, on_error="raise", **plan)


@functools.cache
def bare(name):
    return train_case(zoo.load(name))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_training_gives_the_same_bits_with_all_features(name, tmp_path):
    assert differences(bare(name), train_case(zoo.load(name), watch=watching(tmp_path / "out"))) == []


@pytest.mark.parametrize("name", ["residual_gpt", "checkpoint_nonreentrant", "autocast_bf16", "unbound_imports"])
def test_training_gives_the_same_bits_with_all_features_beside_a_full_dump(name, tmp_path):
    assert differences(bare(name), train_case(zoo.load(name), watch=watching(tmp_path / "out", level="mix"))) == []


@pytest.mark.parametrize("name", ["residual_gpt", "gradient_accumulation", "tied_weights"])
def test_nothing_is_left_behind(name, tmp_path):
    case = zoo.load(name)
    seed_all()
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    one_step(case, model, optimizer, 0)
    before = traces(model, optimizer)
    with watching(tmp_path / "out")(model, optimizer) as probe:
        for step in (1, 2):
            with probe.step():
                one_step(case, model, optimizer, step)
    assert left_behind(before, traces(model, optimizer)) == {}


def test_what_is_off_has_no_tap():
    taps = TorchTaps(Guard())
    schedules = compose(load_plan({"level": "off", "monitor": True}), taps)
    assert [taps.get(role, Tap) for role in ("features", "exchanged", "batches")] == [None, None, None]
    kinds = {type(tap).__name__ for schedule in schedules.values() for tap, _ in schedule.taps}
    assert not kinds & {"FeatureTap", "CollectiveTap", "BatchTap"}


def run(folder, monitor, steps=3, sinks=("memory",), micro=1, model=None, **plan):
    """Train a small GPT; return the collected steps, the model and the probe's findings."""
    torch.manual_seed(0)
    model = model or GPT(width=16, layers=2, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator, collected_steps = torch.Generator().manual_seed(0), []
    options = {"output": folder, "level": "off", "sinks": list(sinks), "monitor": monitor, "on_error": "raise", **plan}
    with trainprobe.watch(model, optimizer, options) as probe:
        for step in range(steps):
            probe.begin_step(step)
            optimizer.zero_grad(set_to_none=True)
            for _ in range(micro):
                tokens = batch(generator)
                loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
            optimizer.step()
            probe.note("loss", loss.detach())
            collected_steps.append(probe.end_step())
    return collected_steps, model, list(probe.findings)


@pytest.mark.parametrize("scale", [1.0, 0.37, "amax"])
def test_lost_shares_and_exponents_are_those_of_the_tensors(tmp_path, scale):
    forms = ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "fp16", "bf16"]
    features = {"formats": {"names": ["layers.1.fc1", "layers.1.fc1.weight"], "formats": forms, "scale": scale}}
    kept = {}
    model = GPT(width=16, layers=2, dropout=0.0)

    def keep(module, args, out):
        kept["output"] = out.detach().clone()
        out.register_hook(lambda g: kept.__setitem__("grad_output", g.clone()))

    model.layers[1].fc1.register_forward_hook(keep)
    kept["value"] = model.layers[1].fc1.weight.detach().clone()
    (step_data,), model, _ = run(tmp_path, {"features": features}, steps=1, model=model)
    kept["grad"] = model.layers[1].fc1.weight.grad
    found = {(f.name, f.slot): f for f in step_data.features}
    assert len(found) == 4 * (2 * len(forms) + 1)
    for slot, tensor in kept.items():
        name = "layers.1.fc1" if "output" in slot else "layers.1.fc1.weight"
        array = tensor.numpy()
        for form in forms:
            factor = (
                scale if scale != "amax" else min(_largest(form) / float(np.abs(array).max()), float(np.finfo(np.float32).max))
            )
            under, over = lost(array, form, float(np.float32(factor)))
            assert found[name, f"underflow_{form}.{slot}"].numbers == pytest.approx([under / array.size], rel=1e-6)
            assert found[name, f"overflow_{form}.{slot}"].numbers == pytest.approx([over / array.size], rel=1e-6)
        told, want = found[name, f"exponents.{slot}"], exponent_histogram(array)
        counts = want.negative + want.positive
        assert told.numbers.tolist() == np.trim_zeros(counts).tolist()
        assert told.edges[0] == 2.0 ** (want.lowest + np.flatnonzero(counts)[0])
        assert np.all(told.edges[1:] == 2 * told.edges[:-1])


def _largest(form):
    from trainprobe.engine.stats.low_precision import FORMATS

    return FORMATS[form].largest


def test_features_are_series_of_their_own_live_and_from_every_writer(tmp_path):
    monitor = {"features": {"attention": True, "weights": True, "formats": True}, "batches": True, "rules": {"spike": False}}
    collected_steps, _, findings = run(tmp_path, monitor, sinks=["parquet", "csv", "tensorboard", "memory"], micro=2)
    assert findings == []
    frames = list(read_frames(tmp_path))
    wanted = {(f.name, slot, f.call): number for f in collected_steps[-1].features for slot, number in f.each()}
    assert len(wanted) > 100
    for frame in (frames[-1], list(read_frames(tmp_path / "rank0" / "metrics.csv"))[-1]):
        shown = [frame.table.series[t] for t in frame.at]
        found = {
            (t.address.name, t.address.slot, t.address.call): x
            for t, x in zip(shown, frame.values, strict=True)
            if t.address.kind == "feature" and t.statistic == "value"
        }
        assert found == wanted
        assert sum(t.address.kind == "feature" for t in shown) == len(wanted)
    rows = [r for r in csv.DictReader((tmp_path / "rank0/metrics.csv").open()) if r["slot"] == "fingerprint"]
    assert [int(r["value"]) for r in rows] == [b for step_data in collected_steps for b in step_data.batches]


def test_the_wide_csv_has_a_row_a_feature(tmp_path):
    monitor = {"features": {"attention": True, "weights": True, "dead_units": {"names": "**.act"}, "formats": {"every": 2}}}
    collected_steps, _, _ = run(tmp_path, monitor, sinks=["csv", "memory"], csv_layout="wide")
    frames = list(read_frames(tmp_path))
    for step_data, frame in zip(collected_steps, frames, strict=True):
        wanted = {(f.name, slot): number for f in step_data.features if f.call == 0 for slot, number in f.each()}
        shown = [frame.table.series[t] for t in frame.at]
        pairs = zip(shown, frame.values, strict=True)
        assert {(t.address.name, t.address.slot): x for t, x in pairs if t.address.kind == "feature"} == wanted


def test_the_wide_csv_has_the_files_of_the_existing_monitor(tmp_path):
    collected_steps, _, _ = run(
        tmp_path, {"features": {"attention": True, "weights": True}}, sinks=["csv", "memory"], csv_layout="wide", micro=2
    )
    folder = tmp_path / "metrics-rank0-wide"
    rows = list(csv.DictReader((folder / "attention_hook_0-999.csv").open()))
    assert list(rows[0]) == ["vpp_stage", "name", "step", "micro_step", "entropy", "softmax_max"]
    assert [(r["name"], r["step"], r["micro_step"]) for r in rows[:4]] == [
        (f"layers.{layer}.attention", "0", str(micro)) for micro in range(2) for layer in range(2)
    ]
    entropy = next(f for f in collected_steps[0].features if f.slot == "attention_entropy")
    assert float(rows[0]["entropy"]) == pytest.approx(entropy.numbers.mean())
    rows = list(csv.DictReader((folder / "linear_hook_0-999.csv").open()))
    assert list(rows[0]) == ["vpp_stage", "name", "step", "sr", "kernel_norm"]
    told = {r["name"]: r for r in rows if r["step"] == "2"}["layers.1.fc1.linear"]
    features = {f.slot: f.numbers[0] for f in collected_steps[2].features if f.name == "layers.1.fc1.weight"}
    assert float(told["kernel_norm"]) == pytest.approx(features["spectral_norm"])
    assert float(told["sr"]) ** 2 == pytest.approx(features["stable_rank"])


def test_tensorboard_shows_features_and_exponents_as_histograms(tmp_path):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    collected_steps, _, _ = run(tmp_path, {"features": {"attention": True, "formats": True}}, sinks=["tensorboard", "memory"])
    events = loading.EventAccumulator(str(tmp_path / "tensorboard/rank0"), size_guidance={"histograms": 0, "scalars": 0})
    events.Reload()
    entropy = next(f for f in collected_steps[-1].features if f.slot == "attention_entropy")
    told = events.Scalars(f"features/{entropy.name}/attention_entropy.2")[-1]
    assert (told.step, told.value) == (2, pytest.approx(entropy.numbers[2]))
    exponents = next(f for f in collected_steps[-1].features if f.slot == "exponents.value")
    shown = events.Histograms(f"features/{exponents.name}/exponents.value")[-1].histogram_value
    assert sum(shown.bucket) == exponents.numbers.sum()
    assert shown.num == exponents.numbers.sum()


def test_a_batch_has_a_fingerprint_of_its_own_and_tokens_are_counted(tmp_path):
    collected_steps, _, _ = run(tmp_path / "a", {"batches": True}, micro=2)
    again, _, _ = run(tmp_path / "b", {"batches": True}, micro=2)
    fingerprints = [b for step_data in collected_steps for b in step_data.batches]
    assert len(set(fingerprints)) == len(fingerprints) == 6
    assert fingerprints == [b for step_data in again for b in step_data.batches]
    assert [step_data.scalars["tokens"] for step_data in collected_steps] == [2 * 8 * 32] * 3


def test_a_threshold_judges_a_feature_live_and_offline(tmp_path):
    rules = {"threshold": {"slots": ["attention_entropy"], "high": 0.5}}
    _, _, findings = run(tmp_path, {"features": {"attention": True}, "rules": rules}, sinks=["parquet"])
    (found,) = findings
    assert (found.rule, found.step, found.site.kind, found.site.name) == ("threshold", 0, "feature", "layers.0")
    assert "attention_entropy.0" in found.message and "7 other series" in found.message
    assert [in_folder(f, tmp_path) for f in judge_frames(read_frames(tmp_path), make_rules(rules))] == findings


def test_fingerprints_of_batches_raise_no_alarm_about_parameters(tmp_path):
    collected_steps, _, findings = run(tmp_path, {"batches": True}, steps=14, sinks=["parquet"])
    assert findings == []
    assert collected_steps[-1].checksums is None


def test_a_batch_is_known_by_the_number_that_the_audit_gives_it(tmp_path):
    torch.manual_seed(0)
    model = GPT(width=16, layers=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = {"output": tmp_path, "level": "off", "monitor": {"batches": True}, "audit": {"every": 1}, "sinks": ["memory"]}
    with trainprobe.watch(model, optimizer, plan) as probe:
        probe.begin_step(0)
        model(batch(torch.Generator().manual_seed(0))[:, :-1]).square().mean().backward()
        optimizer.step()
        step_data = probe.end_step()
        assert tuple(step_data.batches) == probe.audit.audit.last.batches


def test_activations_and_their_gradients_have_patterns_and_intervals_of_their_own(tmp_path):
    monitor = {
        "activations": {"names": "layers.0.fc1", "every": 2},
        "activation_gradients": {"names": "layers.1.*"},
    }
    collected_steps, _, _ = run(tmp_path, monitor, steps=4)
    for step_data in collected_steps:
        seen = {(c.phase, c.name) for c in step_data.calls if c.kind == "module"}
        forward = {("forward", "layers.0.fc1")} if step_data.step % 2 == 0 else set()
        assert {pair for pair in seen if pair[0] == "forward"} == forward
        assert {name for phase, name in seen if phase == "backward"} >= {"layers.1.fc1", "layers.1.proj"}
        assert all(name.startswith("layers.1.") for phase, name in seen if phase == "backward")


def test_a_section_switches_a_feature_on_and_what_cannot_be_used_is_told():
    assert not validate(True).features.on
    plan = validate({"features": {"attention": {"rows": 8}, "weights": True}}).features
    assert (plan.attention.on, plan.attention.rows, plan.weights.on, plan.formats.on) == (True, 8, True, False)
    assert not validate({"features": {"attention": {"on": False, "rows": 8}}}).features.on
    for section, message in (
        ({"attentions": True}, r"features.attentions: unknown key 'attentions' — did you mean 'attention'\?"),
        ({"attention": {"row": 3}}, r"features.attention.row: unknown key 'row' — did you mean 'rows'\?"),
        ({"formats": {"formats": "fp6"}}, r"features.formats.formats.0: 'fp6' cannot be used"),
        ({"formats": {"scale": -1}}, r"features.formats.scale"),
        ({"weights": {"names": "re:["}}, r"is not a regular expression"),
    ):
        with pytest.raises(PlanError, match=message):
            validate({"features": section})


def test_every_key_has_a_docstring():
    for section in (Features, *(field.annotation for field in Features.model_fields.values())):
        assert all(field.description for field in section.model_fields.values())
    assert AttentionSettings.__doc__ and FormatSettings.__doc__


@pytest.mark.parametrize(
    "where", ["attention.of_logits", "weight_spectra.spectrum", "number_formats.limits_under", "dead_units.dead_share"]
)
def test_a_fault_of_a_feature_changes_nothing_of_the_training(tmp_path, monkeypatch, where, capsys):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("planted")

    _, bare, _ = run(tmp_path / "bare", True)
    functions = [torch.nn.functional.scaled_dot_product_attention, torch.nn.Module._call_impl, torch.softmax]
    monkeypatch.setattr(f"trainprobe.engine.capture.features.{where}", broken)
    collected_steps, model, findings = run(tmp_path / "on", {"features": ALL}, on_error="continue")
    assert all(map(torch.equal, bare.parameters(), model.parameters()))
    if where == "dead_units.dead_share":  # what one value costs is that value and a note
        assert findings == [] and any("planted" in note for step_data in collected_steps for note in step_data.notes)
        return
    assert [f.rule for f in findings] == ["probe"] and "planted" in findings[0].message
    assert all(step_data is not None and step_data.features for step_data in collected_steps)  # of the other kinds
    assert functions == [torch.nn.functional.scaled_dot_product_attention, torch.nn.Module._call_impl, torch.softmax]
    assert "is left out from here on, everything else goes on" in capsys.readouterr().err


def test_routers_do_not_ask_for_weights_that_are_worked_out_when_they_are_asked_for(tmp_path):
    def trained(**plan):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), spectral_norm(nn.Linear(8, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trainprobe.watch(model, optimizer, level="off", sinks=[], output=tmp_path / str(len(plan)), **plan) as probe:
            for _ in range(3):
                with probe.step():
                    optimizer.zero_grad()
                    model(torch.randn(6, 4)).square().mean().backward()
                    optimizer.step()
        return model.state_dict()

    bare = trained()
    watched = trained(monitor={"features": {"routers": {"names": "**"}}})
    assert all(torch.equal(bare[name], watched[name]) for name in bare)
