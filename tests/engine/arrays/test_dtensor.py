"""A DTensor is described by its mesh and placements, and its local shard is what is reduced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainprobe.engine.arrays.torch_arrays import TorchStatsRows, local_of
from trainprobe.engine.stats.partials import STATS


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_a_dtensor_gives_its_shard_mesh_and_placements(mesh: object) -> None:
    if torch.__version__ < (2, 5):
        from torch.distributed._tensor import DTensor, Partial, Replicate, Shard
    else:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    t = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(1), Partial()])
    inner, kind, extra, note = local_of(t)
    assert type(inner) is torch.Tensor and TorchStatsRows(STATS).add(inner) == 0
    assert kind == f"{DTensor.__module__}.DTensor" and note is None
    assert extra == {"device_mesh": [[0]], "placements": [{"Shard": {"dim": 1}}, {"Partial": {"reduce_op": "sum"}}]}
    replicated = local_of(DTensor.from_local(torch.ones(2), mesh, [Replicate(), Replicate()]))[2]
    assert replicated is not None and replicated["placements"] == [{"Replicate": {}}] * 2
