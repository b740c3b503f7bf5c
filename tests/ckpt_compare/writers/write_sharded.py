"""Write FSDP and Lightning checkpoints with two gloo ranks.

Usage: write_sharded.py OUT KIND [KIND …]; fsdp1, fsdp2, tensor, lightning.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402


class Net(nn.Module):
    """Odd sizes, so that shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.norm, self.fc2, self.head = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 13), nn.Linear(13, 3)

    def forward(self, x):
        return self.head(torch.relu(self.fc2(torch.relu(self.norm(self.fc1(x))))))


def batch(step: int):
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(4, 7, generator=g), torch.randint(0, 3, (4,), generator=g)


def train(net: nn.Module) -> torch.optim.Optimizer:
    """Every rank sees the same batch, so that the mean over ranks is exact."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(3):
        x, y = batch(step)
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save(net: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model, states = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": states}, checkpoint_id=folder)


def fsdp2(out: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    for module in (net.fc1, net.fc2, net.head, net):
        fully_shard(module, mesh=mesh)
    optimizer = train(net)
    save(net, optimizer, f"{out}/fsdp2")
    if dist.get_rank() == 0:
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(f"{out}/fsdp2", f"{out}/fsdp2_joined.pt")


def fsdp1(out: str) -> None:
    """The older FSDP: full state dicts in one file, and sharded ones (ShardedTensor) as a distributed checkpoint."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.distributed.fsdp.api import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    device = torch.device("cpu")
    net = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=device, use_orig_params=True)
    optimizer = train(net)
    full = (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )
    with FSDP.state_dict_type(net, *full):
        whole = {"model": net.state_dict(), "optimizer": FSDP.optim_state_dict(net, optimizer), "step": 3}
    if dist.get_rank() == 0:
        torch.save(whole, f"{out}/fsdp1_full.pt")
    with FSDP.state_dict_type(net, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()):
        parts = {"model": net.state_dict(), "optim": FSDP.optim_state_dict(net, optimizer)}
        dcp.save(parts, checkpoint_id=f"{out}/fsdp1_sharded")


def tensor(out: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    net = Net()
    optimizer = train(net)
    full = net.state_dict()
    split = parallelize_module(Net(), mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    with torch.no_grad():
        for name, p in split.named_parameters():
            if hasattr(p, "placements"):
                from torch.distributed.tensor import distribute_tensor

                p.copy_(distribute_tensor(full[name], mesh, p.placements))
            else:
                p.copy_(full[name])
    dcp.save({"model": split.state_dict()}, checkpoint_id=f"{out}/tensor")
    if dist.get_rank() == 0:
        torch.save({"model": full, "optimizer": optimizer.state_dict(), "step": 3}, f"{out}/plain.pt")


def lightning(out: str) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, data, index):
            return nn.functional.cross_entropy(self.net(data[0]), data[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=3, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader([tuple(batch(i)) for i in range(3)], batch_size=None))
    trainer.save_checkpoint(f"{out}/lightning.ckpt")


def main() -> None:
    out, kinds = sys.argv[1], sys.argv[2:]
    Path(out).mkdir(parents=True, exist_ok=True)
    if kinds != ["lightning"]:
        dist.init_process_group("gloo")
    for kind in kinds:
        {"fsdp1": fsdp1, "fsdp2": fsdp2, "tensor": tensor, "lightning": lightning}[kind](out)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
