"""The same bits with and without the probe, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch

import trainprobe
from tests import zoo
from tests.lockstep import Bits, differences, one_step, seed_all, state, train
from tests.traces import left_behind, traces

LEVELS = ("L0", "L1", "mix")
RECORDED = {
    "statistics": {},
    "checksum": {"summary": "checksum"},
    "md5": {"summary": "md5"},
    "tensor": {"task": "tensor"},
}


@functools.cache
def bare(name: str) -> Bits:
    return train(zoo.load(name))


def watching(folder, **plan):
    return lambda model, optimizer: trainprobe.watch(model, optimizer, output=folder, on_error="raise", **plan)


@pytest.mark.parametrize("recorded", RECORDED)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_training_gives_the_same_bits_with_and_without_the_probe(name, level, recorded, tmp_path):
    watched = train(zoo.load(name), watch=watching(tmp_path / "out", level=level, **RECORDED[recorded]))
    assert differences(bare(name), watched) == []


@pytest.mark.parametrize("statistics", ["std", "all"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_statistics_on_request_change_no_bits(name, statistics, tmp_path):
    wanted = (
        ("std",) if statistics == "std" else ("max", "min", "mean", "norm", "std", "absmax", "nan", "inf", "zero", "sublow")
    )
    watched = train(zoo.load(name), watch=watching(tmp_path / "out", level="mix", statistics=wanted))
    assert differences(bare(name), watched) == []


@pytest.mark.parametrize("name", zoo.NAMES)
def test_steps_that_are_not_collected_give_the_same_bits(name, tmp_path):
    watched = train(zoo.load(name), watch=watching(tmp_path / "out", level="mix", step=[1]))
    assert differences(bare(name), watched) == []


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_nothing_is_left_behind_after_close(name, level, tmp_path):
    case = zoo.load(name)
    seed_all()
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    one_step(case, model, optimizer, 0)  # torch's own lazy patches and the optimizer's state come into being
    before = traces(model, optimizer)
    with watching(tmp_path / "out", level=level)(model, optimizer) as probe:
        for step in (1, 2):
            with probe.step():
                one_step(case, model, optimizer, step)
    assert left_behind(before, traces(model, optimizer)) == {}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_no_op_level_patch_is_installed_between_steps(name, tmp_path):
    case = zoo.load(name)
    seed_all()
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    one_step(case, model, optimizer, 0)
    before = traces(model, optimizer)
    with watching(tmp_path / "out", level="mix", step=[0])(model, optimizer) as probe:
        with probe.step():
            one_step(case, model, optimizer, 1)
        between = left_behind(before, traces(model, optimizer))
    assert [k for k in between if not k.startswith(("_forward", "_backward", "attributes of", "threads", "optimizer _"))] == []


@pytest.fixture(params=["residual_gpt", "batchnorm_branches", "recurrent"])
def attached(request, tmp_path):
    """A model with a probe attached that has collected one step, with its case and probe."""
    case = zoo.load(request.param)
    seed_all()
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with watching(tmp_path / "out", level="mix")(model, optimizer) as probe:
        with probe.step():
            one_step(case, model, optimizer, 0)
        yield case, model, optimizer, probe


def same_output(case, a, b):
    seed_all()
    x = zoo.mean_of_leaves(a.eval(), case.batch(5)[:1])
    seed_all()
    y = zoo.mean_of_leaves(b.eval(), case.batch(5)[:1])
    return torch.equal(x, y)


def test_an_attached_model_can_be_pickled(attached):
    case, model, _, _ = attached
    assert same_output(case, model, pickle.loads(pickle.dumps(model)))


def test_an_attached_model_can_be_saved_whole_and_its_optimizer_too(attached):
    case, model, optimizer, _ = attached
    file = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    assert same_output(case, model, torch.load(file, weights_only=False)["model"])


def test_a_deepcopy_of_an_attached_model_computes_with_its_own_weights(attached):
    case, model, _, _ = attached
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not same_output(case, model, twin)


def test_a_deepcopy_made_inside_a_collected_step_is_not_recorded_and_trains_alone(attached):
    case, model, optimizer, probe = attached
    with probe.step():
        twin = copy.deepcopy(model)
        one_step(case, twin, torch.optim.SGD(twin.parameters(), lr=0.1), 1)
        one_step(case, model, optimizer, 1)
    assert same_output(case, model, copy.deepcopy(model))


def test_the_state_dict_of_an_attached_model_has_no_new_keys(attached):
    case, model, _, _ = attached
    assert list(model.state_dict()) == list(case.build().state_dict())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["residual_gpt", "batchnorm_branches"])
def test_a_model_compiled_while_attached_trains_to_the_same_bits(name, backend, tmp_path):
    case = zoo.load(name)

    def compiled(watch):
        torch.compiler.reset()
        seed_all()
        model = case.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if watch is None:
            fast = torch.compile(model, backend=backend)
            for step in range(3):
                one_step(case, fast, optimizer, step)
        else:
            with watch(model, optimizer) as probe:
                fast = torch.compile(model, backend=backend)
                for step in range(2):
                    with probe.step():
                        one_step(case, fast, optimizer, step)
            one_step(case, fast, optimizer, 2)
        return state(model, optimizer)

    assert differences(compiled(None), compiled(watching(tmp_path / "out", level="mix", step=[1]))) == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_that_is_already_compiled_trains_to_the_same_bits(backend, tmp_path):
    case = zoo.load("residual_gpt")

    def run(watch):
        torch.compiler.reset()
        seed_all()
        model = torch.compile(case.build(), backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        one_step(case, model, optimizer, 0)
        if watch is None:
            one_step(case, model, optimizer, 1)
        else:
            with watch(model, optimizer) as probe, probe.step():
                one_step(case, model, optimizer, 1)
        return state(model, optimizer)

    assert differences(run(None), run(watching(tmp_path / "out", level="mix"))) == []
