"""Logical names: the same whatever wrappers stand around the model."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainprobe
from trainprobe.engine.core.naming import count_outer_wrappers, is_outer_wrapper, logical_name


@pytest.mark.parametrize(
    ("raw", "outer", "plain"),
    [
        ("module.layers.0.mlp", 1, "layers.0.mlp"),
        ("module.module.layers.0", 2, "layers.0"),
        ("module.layers.0", 0, "module.layers.0"),
        ("_orig_mod.layers._checkpoint_wrapped_module.0", 0, "layers.0"),
        ("_fsdp_wrapped_module.a", 0, "a"),
    ],
)
def test_a_wrapped_name_loses_its_wrappers_and_nothing_else(raw, outer, plain):
    assert logical_name(raw, outer_wrappers=outer) == plain


def test_wrappers_are_counted_where_all_names_share_them():
    assert count_outer_wrappers(["module", "module.module", "module.module.a", "module.module.b"]) == 2
    assert count_outer_wrappers(["module", "head"]) == 0


def test_only_what_stands_around_the_model_is_a_wrapper():
    assert [is_outer_wrapper(name, 2) for name in ("", "module", "module.module", "module.module.a")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.fixture
def one_rank():
    """A process group of one, for DistributedDataParallel."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_has_the_same_entries_with_and_without_ddp(one_rank, tmp_path):
    def entries(wrap, folder):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        with trainprobe.watch(model, output=folder, level="L0") as probe:
            probe.begin_step()
            model(torch.ones(2, 4)).sum().backward()
            step_data = probe.end_step()
        return {(call.kind, call.name, call.cls, call.call, call.phase) for call in step_data.calls}

    assert entries(nn.parallel.DistributedDataParallel, tmp_path / "ddp") == entries(lambda m: m, tmp_path / "plain")
