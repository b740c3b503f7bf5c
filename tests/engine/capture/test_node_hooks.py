"""Hooks on autograd nodes that are entered without a handle, beside those of the program."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import function

import trainprobe
from trainprobe.compiled import recording


def in_place():
    return vars(function._HookMixin)["_register_hook"]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_the_program_may_hook_the_same_nodes_and_remove_its_hooks(level, tmp_path):
    def run(watched):
        torch.manual_seed(0)
        model, called = torch.nn.Linear(3, 2), []

        def step():
            out = model(torch.ones(1, 3))
            node = out.grad_fn
            kept = node.register_hook(lambda sent, received: called.append(("behind", received[0].tolist())))
            gone = node.register_prehook(lambda received: called.append(("never", None)))
            gone.remove()
            doubled = node.register_prehook(lambda received: tuple(2 * g for g in received))
            out.sum().backward()
            kept.remove()
            doubled.remove()

        if not watched:
            step()
        else:
            with trainprobe.watch(model, output=tmp_path, level=level, sinks=["memory"]) as probe, probe.step():
                step()
        return called, [p.grad.tolist() for p in model.parameters()]

    assert run(True) == run(False)


def test_torch_registers_hooks_itself_again_when_the_last_probe_has_gone(tmp_path):
    before = in_place()
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    with trainprobe.watch(models[0], output=tmp_path / "a", level="L0") as outer, outer.step():
        assert in_place() is not before
        with trainprobe.watch(models[1], output=tmp_path / "b", level="L1") as inner, inner.step():
            models[1](torch.ones(1, 3)).sum().backward()
        assert in_place() is not before
        models[0](torch.ones(1, 3)).sum().backward()
    assert in_place() is before


def test_what_is_not_collected_registers_by_torchs_own_function(tmp_path):
    before = in_place()
    model = torch.nn.Linear(3, 2)
    with trainprobe.watch(model, output=tmp_path, level="L0", step=[1]) as probe:
        for step in range(3):
            with probe.step():
                assert (in_place() is before) == (step != 1)
                model(torch.ones(1, 3)).sum().backward()
    assert in_place() is before


def test_a_registrar_passes_on_what_is_not_its_own():
    registrar = recording.Registrar()
    registrar.below = lambda hooks, hook: ("below", hooks, hook)
    assert registrar(None, print) == ("below", None, print)
    with pytest.raises(RuntimeError, match="stands in no place"):
        recording.Registrar()(None, print)
