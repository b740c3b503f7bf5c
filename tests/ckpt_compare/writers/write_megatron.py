"""Write checkpoints with megatron-core on a CPU, one process a rank: the same weights in any layout.

The first run trains two steps and saves; later runs load that `torch_dist` checkpoint into another layout (megatron reshards)
and save again, in `torch_dist` and in the legacy per-rank layout that `megatron.training.checkpointing` writes.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import multiprocessing
import random
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron_cpu"))
import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()
import megatron.core.models.gpt  # noqa: E402  (imported once for all forks of this process)
import megatron.core.optimizer  # noqa: E402, F401
import tiny_gpt  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402

MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}


def arguments() -> argparse.Namespace:
    p = tiny_gpt.parser()
    p.add_argument("--load")
    p.add_argument("--save-dist")
    p.add_argument("--save-legacy")
    p.add_argument("--load-weights-only", type=int, default=0, help="chained optimizers load from their own layout alone")
    p.add_argument("--save-logits", help="what the model says to a fixed input, on one rank")
    p.add_argument("--iteration", type=int, default=2)
    p.add_argument("--sharding", default="fully_reshardable", help="how the distributed optimizer stores its state")
    p.add_argument("--fully-parallel", type=int, default=0, help="ranks share the saving out, as Megatron-LM does by default")
    p.add_argument("--foreign-arguments", type=int, default=0, help="which torch.load(weights_only=True) refuses")
    p.add_argument("--mla", type=int, default=0, help="multi-latent attention")
    p.add_argument("--mtp", type=int, default=0, help="layers of multi-token prediction")
    return p.parse_args()


def choose_architecture(a) -> None:
    """Let the tiny GPT have multi-latent attention, or layers of multi-token prediction."""
    from megatron.core.models import gpt
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer import transformer_config as configs
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if a.mla:
        configs.TransformerConfig = partial(configs.MLATransformerConfig, **MLA, rope_type="rope")
        specs.get_gpt_layer_local_spec = partial(specs.get_gpt_layer_local_spec, multi_latent_attention=True)
        mla.TELinear = type("NoTransformerEngine", (), {})
        begin = DotProductAttention.__init__

        def init(self, *args, k_channels=None, v_channels=None, **settings):
            begin(self, *args, **settings)  # the local attention reads these widths off its inputs

        DotProductAttention.__init__ = init
    if a.mtp:
        configs.TransformerConfig = partial(configs.TransformerConfig, mtp_num_layers=a.mtp)

        def model(config, transformer_layer_spec, vp_stage=None, **settings):
            block = specs.get_gpt_mtp_block_spec(config, transformer_layer_spec, False, vp_stage=vp_stage)
            return bare(config, transformer_layer_spec, vp_stage=vp_stage, mtp_block_spec=block, **settings)

        bare = gpt.GPTModel
        gpt.GPTModel = model


def rng_state(a) -> dict:
    from megatron.core import tensor_parallel

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def foreign_arguments() -> dict:
    """Values of the classes that Megatron-LM's own namespace holds beside numbers and text."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {
        "exit_signal": signal.SIGTERM, "attention_backend": AttnBackend.auto, "model_type": ModelType.encoder_or_decoder,
        "init_method": partial(torch.nn.init.normal_, std=0.02), "activation_func": torch.nn.functional.silu,
        "save": Path("/checkpoints"), "distributed_timeout": datetime.timedelta(minutes=10),
        "config": TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2),
    }  # fmt: skip


def training_arguments(a) -> argparse.Namespace:
    """The fields of Megatron-LM's own namespace that describe the model and the layout."""
    world = dist.get_world_size()
    return argparse.Namespace(
        num_layers=a.layers, hidden_size=a.hidden, ffn_hidden_size=a.ffn, num_attention_heads=a.heads,
        group_query_attention=a.groups != a.heads, num_query_groups=a.groups, kv_channels=a.hidden // a.heads,
        swiglu=bool(a.swiglu), padded_vocab_size=tiny_gpt.padded_vocab(a), make_vocab_size_divisible_by=a.vocab_div,
        num_experts=a.moe or None, moe_ffn_hidden_size=a.ffn, moe_grouped_gemm=bool(a.grouped),
        untie_embeddings_and_output_weights=bool(a.untied), tensor_model_parallel_size=a.tp,
        pipeline_model_parallel_size=a.pp, virtual_pipeline_model_parallel_size=a.vpp,
        expert_model_parallel_size=a.ep, expert_tensor_parallel_size=a.etp or a.tp, world_size=world,
        data_parallel_size=world // a.tp // a.pp, use_distributed_optimizer=bool(a.dist_opt), bf16=a.dtype == "bf16",
        iteration=a.iteration, position_embedding_type=a.pos, normalization=a.norm, add_bias_linear=bool(a.bias),
        vocab_size=a.vocab, ddp_bucket_size=a.bucket, q_lora_rank=MLA["q_lora_rank"], kv_lora_rank=MLA["kv_lora_rank"],
        qk_pos_emb_head_dim=MLA["qk_pos_emb_head_dim"],
        params_dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[a.dtype],
        **(foreign_arguments() if a.foreign_arguments else {}),
    )  # fmt: skip


def sharded(a, chunks, optimizer, loading: bool) -> dict:
    from megatron.core import parallel_state as ps

    model = {}
    for i, chunk in enumerate(chunks):
        if len(chunks) > 1:
            ps.set_virtual_pipeline_model_parallel_rank(i)
        bare = chunk.module
        model["model" if len(chunks) == 1 else f"model{i}"] = bare.sharded_state_dict()
    state = dict(model)
    sharding = "fully_reshardable" if loading else a.sharding
    kind = {"metadata": {"distrib_optim_sharding_type": sharding}} if a.dist_opt else {}
    state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=loading, **kind)
    return state


def common(a) -> dict:
    return {
        "args": training_arguments(a), "checkpoint_version": 3.0, "iteration": a.iteration,
        "opt_param_scheduler": {"max_lr": 0.01, "lr_warmup_steps": 0, "num_steps": 16 * a.iteration,
        "lr_decay_style": "constant"},
        "num_floating_point_operations_so_far": 0,
    }  # fmt: skip


def load(a, chunks, optimizer) -> None:
    from megatron.core import dist_checkpointing

    wanted = sharded(a, chunks, optimizer, True)
    if a.load_weights_only:
        del wanted["optimizer"]
    state = dist_checkpointing.load(wanted, a.load)
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state["model" if len(chunks) == 1 else f"model{i}"])
    if not a.load_weights_only:
        optimizer.load_state_dict(state["optimizer"])


def save_dist(a, chunks, optimizer) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    folder = Path(a.save_dist) / f"iter_{a.iteration:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(a.iteration))
    dist.barrier()
    state = {**sharded(a, chunks, optimizer, False), **common(a)}
    grid = (a.pp, a.tp), (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank())
    state["rng_state"] = ShardedObject("rng_state", [rng_state(a)], *grid, replica_id=ps.get_data_parallel_rank())
    # Megatron starts the process of this queue anew, where torch and Megatron are imported once more
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    strategy = None
    if a.fully_parallel:
        strategy = get_default_save_sharded_strategy("torch_dist", 1)
        strategy = FullyParallelSaveStrategyWrapper(strategy, ps.get_data_parallel_group(with_context_parallel=True))
    dist_checkpointing.save(state, str(folder), strategy)


def legacy_name(a) -> str:
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if a.pp > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if a.ep > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    return name


def save_legacy(a, chunks, optimizer) -> None:
    from megatron.core import parallel_state as ps

    folder = Path(a.save_legacy) / f"iter_{a.iteration:07d}" / legacy_name(a)
    folder.mkdir(parents=True, exist_ok=True)
    if a.dist_opt:
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    expert_data_rank = ps.get_expert_data_parallel_rank() if a.moe else ps.get_data_parallel_rank()
    if expert_data_rank:
        return
    state = {**common(a), "optimizer": optimizer.state_dict(), "rng_state": [rng_state(a)]}
    for i, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{i}"] = chunk.module.state_dict_for_save_checkpoint()
    torch.save(state, folder / "model_optim_rng.pt")
    (folder.parent.parent / "latest_checkpointed_iteration.txt").write_text(str(a.iteration))


def save_logits(a, chunks) -> None:
    """Save input tokens and logits: what the weights mean, whatever they are called."""
    tokens = torch.arange(a.seq).unsqueeze(0) * 7 % a.vocab
    mask = torch.triu(torch.ones(a.seq, a.seq), diagonal=1).bool()[None, None]
    with torch.no_grad():
        logits = chunks[0](tokens, torch.arange(a.seq).unsqueeze(0), mask)
    torch.save({"tokens": tokens, "logits": logits.clone()}, a.save_logits)


def main() -> None:
    a = arguments()
    choose_architecture(a)
    tiny_gpt.init_dist(a)
    config = tiny_gpt.make_config(a)
    chunks = tiny_gpt.wrap(a, config, tiny_gpt.build_chunks(a, config))
    optimizer = tiny_gpt.make_optimizer(a, chunks)
    tiny_gpt.sync_config(a, config, chunks, optimizer)
    if a.load:
        load(a, chunks, optimizer)
    else:
        tiny_gpt.train(a, config, chunks, optimizer)
    if a.save_logits:
        save_logits(a, chunks)
    if a.save_dist:
        save_dist(a, chunks, optimizer)
    if a.save_legacy:
        save_legacy(a, chunks, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
