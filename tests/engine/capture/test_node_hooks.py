"""Hooks on autograd nodes beside those of the program."""

from __future__ import annotations

import pytest
import torch

import trainprobe


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
