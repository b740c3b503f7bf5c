"""Write an `fsdp_dtensor` checkpoint with Megatron FSDP on CPU ranks, and beside it what Megatron itself gathers of it.

The order of calls is that of `megatron.training.checkpointing.save_checkpoint` for this format. Megatron FSDP names CUDA
devices in so many places that `torch.device` itself answers cpu here; gradients are summed and not scaled, since gloo cannot
do that. Gathered parameters are waited for at once: it frees their memory by the order of CUDA streams, and a gloo thread that
still writes there then breaks the heap.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402
from torch.distributed import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron_cpu"))
sys.path.insert(0, str(Path(__file__).parent))
import megatron_on_cpu  # noqa: E402

_DEVICE = torch.device
_FROM_GROUP = DeviceMesh.from_group
_COALESCING = c10d._coalescing_manager


class _OnCpu(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, _DEVICE)

    def __call__(cls, *args, **kwargs):
        cuda = str((*args, kwargs.get("type"))[0]).startswith("cuda")
        return _DEVICE("cpu") if cuda else _DEVICE(*args, **kwargs)


class Device(metaclass=_OnCpu):
    """`torch.device` without CUDA."""


def from_group(*args, **kwargs):
    return _FROM_GROUP(*args, **{**kwargs, "device_type": "cpu"})


@contextmanager
def coalescing(*args, **kwargs):
    with _COALESCING(*args, **kwargs) as manager:
        yield manager
    manager.wait()


megatron_on_cpu.install()
dist._coalescing_manager = c10d._coalescing_manager = coalescing
torch.device = Device
DeviceMesh.from_group = staticmethod(from_group)
dist._make_nccl_premul_sum = c10d._make_nccl_premul_sum = lambda factor: dist.ReduceOp.SUM

import tiny_gpt  # noqa: E402
import write_megatron  # noqa: E402


def build(a):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    config = tiny_gpt.make_config(a)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params",
        check_for_nan_in_grad=False,
    )  # fmt: skip
    (chunk,) = tiny_gpt.build_chunks(a, config)
    model = FullyShardedDataParallel(config, settings, chunk, device=torch.device("cpu"))
    optimizer = tiny_gpt.make_optimizer(a, [model])
    tiny_gpt.sync_config(a, config, [model], optimizer)
    tiny_gpt.train(a, config, [model], optimizer)
    complete(optimizer.optimizer)
    return model, optimizer


def complete(optimizer) -> None:
    """Give every parameter a state, in one order on all ranks: torch's Adam has none for empty shards, the fused one has."""
    state = optimizer.state
    held = {p: state.pop(p, None) for group in optimizer.param_groups for p in group["params"]}
    step = next(slots["step"] for slots in held.values() if slots)
    for parameter, slots in held.items():
        state[parameter] = slots or {
            "step": step.clone(),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def gathered(state: dict) -> dict[str, torch.Tensor]:
    """Return what Megatron gathers of each sharded tensor, by dotted name."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_uneven_dtensor_to_full_tensor

    found: dict[str, torch.Tensor] = {}
    for key, value in sorted(state.items(), key=lambda item: str(item[0])):  # in the same order on every rank
        if isinstance(value, dict):
            found |= {f"{key}.{name}": tensor for name, tensor in gathered(value).items()}
        elif isinstance(value, DTensor):
            found[str(key)] = gather_uneven_dtensor_to_full_tensor(value).to_local().clone()
    return found


def main() -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as steps

    a = write_megatron.arguments()
    tiny_gpt.init_dist(a)
    model, optimizer = build(a)
    state = {**write_megatron.common(a), "model": model.module.state_dict_for_save_checkpoint()}
    kind = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    state["optimizer"] = optimizer.sharded_state_dict({"model": state["model"]}, is_loading=False, metadata=kind)
    state["rng_state"] = {"(0, 0)": [write_megatron.rng_state(a)]}
    preprocess_state_dict_for_uneven_dtensor(state)
    whole = gathered({"model": state["model"], "optimizer": state["optimizer"]["state"]})
    steps.handle_fp8_extra_state_case(state["model"])
    if a.swiglu:
        state["model"], _ = steps.handle_swiglu_in_state_dict(model, state["model"], None)
        _, state["optimizer"] = steps.handle_swiglu_in_state_dict(model.module, {}, state["optimizer"])
    if a.moe:
        state["model"] = steps.handle_experts_in_state_dict(state["model"], a.moe)
    preprocess_state_dict_for_uneven_dtensor(state)
    folder = Path(a.save_dist) / f"iter_{a.iteration:07d}"
    writer = torch.distributed.checkpoint.FileSystemWriter(str(folder))
    torch.distributed.checkpoint.save(state_dict=state, storage_writer=writer)
    if dist.get_rank() == 0:
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(a.iteration))
        torch.save(whole, folder.parent / "gathered.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
