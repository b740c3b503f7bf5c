"""Tiny GPT on megatron.core, one place for every layout."""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist


def parser():
    p = argparse.ArgumentParser()
    p.add_argument("--tp", type=int, default=1)
    p.add_argument("--pp", type=int, default=1)
    p.add_argument("--vpp", type=int, default=None)
    p.add_argument("--ep", type=int, default=1)
    p.add_argument("--etp", type=int, default=None)
    p.add_argument("--cp", type=int, default=1)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--hidden", type=int, default=64)
    p.add_argument("--ffn", type=int, default=96)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--groups", type=int, default=4, help="GQA query groups")
    p.add_argument("--seq", type=int, default=16)
    p.add_argument("--vocab", type=int, default=120, help="unpadded vocab")
    p.add_argument("--vocab-div", type=int, default=32)
    p.add_argument("--mbs", type=int, default=2)
    p.add_argument("--micro", type=int, default=4, help="micro-batches per step and DP rank")
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--moe", type=int, default=0, help="number of experts, 0 = dense")
    p.add_argument("--topk", type=int, default=2)
    p.add_argument("--dispatcher", default="alltoall")
    p.add_argument("--grouped", type=int, default=0)
    p.add_argument("--shared-expert", type=int, default=0)
    p.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    p.add_argument("--dist-opt", type=int, default=0)
    p.add_argument("--overlap-grad", type=int, default=0)
    p.add_argument("--overlap-param", type=int, default=0)
    p.add_argument("--bucket", type=int, default=None)
    p.add_argument("--avg-coll", type=int, default=0)
    p.add_argument("--grad-fp32", type=int, default=1)
    p.add_argument("--sp", type=int, default=0, help="sequence parallel")
    p.add_argument("--untied", type=int, default=0)
    p.add_argument("--swiglu", type=int, default=1)
    p.add_argument("--bias", type=int, default=0)
    p.add_argument("--qkln", type=int, default=0)
    p.add_argument("--pos", default="rope")
    p.add_argument("--norm", default="RMSNorm")
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--recompute", default=None, choices=[None, "full", "selective"])
    p.add_argument("--recompute-modules", default="core_attn")
    p.add_argument("--cpu-init", type=int, default=1)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--per-token-loss", type=int, default=0)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--instances", type=int, default=1, help="num_distributed_optimizer_instances")
    p.add_argument("--flags", default="", help="k=v,k=v extra TransformerConfig fields")
    return p


def padded_vocab(a):
    mult = a.vocab_div * a.tp
    return (a.vocab + mult - 1) // mult * mult


def init_dist(a):
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ps.initialize_model_parallel(
        tensor_model_parallel_size=a.tp,
        pipeline_model_parallel_size=a.pp,
        virtual_pipeline_model_parallel_size=a.vpp,
        context_parallel_size=a.cp,
        expert_model_parallel_size=a.ep,
        expert_tensor_parallel_size=a.etp,
        num_distributed_optimizer_instances=a.instances,
    )
    torch.manual_seed(a.seed)
    model_parallel_cuda_manual_seed(a.seed)


def make_config(a):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    dt = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[a.dtype]
    kw = {
        "num_layers": a.layers,
        "hidden_size": a.hidden,
        "ffn_hidden_size": a.ffn,
        "num_attention_heads": a.heads,
        "num_query_groups": a.groups,
        "normalization": a.norm,
        "add_bias_linear": bool(a.bias),
        "gated_linear_unit": bool(a.swiglu),
        "activation_func": torch.nn.functional.silu if a.swiglu else torch.nn.functional.gelu,
        "hidden_dropout": a.dropout,
        "attention_dropout": a.dropout,
        "qk_layernorm": bool(a.qkln),
        "tensor_model_parallel_size": a.tp,
        "pipeline_model_parallel_size": a.pp,
        "virtual_pipeline_model_parallel_size": a.vpp,
        "context_parallel_size": a.cp,
        "expert_model_parallel_size": a.ep,
        "expert_tensor_parallel_size": a.etp,
        "sequence_parallel": bool(a.sp),
        "params_dtype": dt,
        "pipeline_dtype": dt,
        "bf16": a.dtype == "bf16",
        "fp16": a.dtype == "fp16",
        "use_cpu_initialization": bool(a.cpu_init),
        "calculate_per_token_loss": bool(a.per_token_loss),
        # CPU friendly switches
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "async_tensor_model_parallel_allreduce": False,
        "transformer_impl": "local",
        "finalize_model_grads_func": finalize_model_grads,
    }
    if a.vpp:
        kw.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if a.moe:
        kw.update(
            num_moe_experts=a.moe,
            moe_router_topk=a.topk,
            moe_token_dispatcher_type=a.dispatcher,
            moe_grouped_gemm=bool(a.grouped),
            moe_ffn_hidden_size=a.ffn,
            moe_aux_loss_coeff=1e-2,
        )
        if a.shared_expert:
            kw.update(moe_shared_expert_intermediate_size=a.shared_expert)
    if a.recompute:
        kw.update(recompute_granularity=a.recompute)
        if a.recompute == "full":
            kw.update(recompute_method="uniform", recompute_num_layers=1)
        else:
            kw.update(recompute_modules=a.recompute_modules.split("+"))
    for item in filter(None, a.flags.split(",")):
        k, v = item.split("=")
        kw[k] = eval(v)
    return TransformerConfig(**kw)


def build_chunks(a, config):
    """Un-wrapped GPTModel chunks of this rank (len == vpp or 1)."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.enums import ModelType

    chunks = []
    for vp in range(a.vpp or 1):
        vp_stage = vp if a.vpp else None
        if a.vpp:
            ps.set_virtual_pipeline_model_parallel_rank(vp)
        pre = ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        post = ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        if a.moe:
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=a.norm, qk_l2_norm=False, vp_stage=vp_stage
            )
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=bool(a.qkln), normalization=a.norm)
        m = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocab(a),
            max_sequence_length=a.seq,
            pre_process=pre,
            post_process=post,
            parallel_output=True,
            share_embeddings_and_output_weights=not a.untied,
            position_embedding_type=a.pos if a.pos != "none" else "none",
            vp_stage=vp_stage,
        )
        m.model_type = ModelType.encoder_or_decoder
        chunks.append(m)
    from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes

    for m in chunks:
        for p in m.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(p)
    return chunks


def wrap(a, config, chunks):
    """Float16Module (bf16/fp16) + DistributedDataParallel, like megatron.training.get_model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    if a.dtype != "fp32":
        chunks = [Float16Module(config, m) for m in chunks]
    ddp_cfg = DistributedDataParallelConfig(
        grad_reduce_in_fp32=bool(a.grad_fp32),
        overlap_grad_reduce=bool(a.overlap_grad),
        overlap_param_gather=bool(a.overlap_param),
        use_distributed_optimizer=bool(a.dist_opt),
        check_for_nan_in_grad=False,
        bucket_size=a.bucket,
        average_in_collective=bool(a.avg_coll),
        num_distributed_optimizer_instances=a.instances,
    )
    chunks = [DistributedDataParallel(config, ddp_cfg, m, disable_bucketing=(i > 0)) for i, m in enumerate(chunks)]
    for m in chunks:
        m.broadcast_params()
    return chunks


def make_optimizer(a, chunks):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dt = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[a.dtype]
    cfg = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.01,
        bf16=a.dtype == "bf16",
        fp16=a.dtype == "fp16",
        params_dtype=dt,
        use_distributed_optimizer=bool(a.dist_opt),
        clip_grad=a.clip,
        overlap_param_gather=bool(a.overlap_param),
    )
    return get_megatron_optimizer(cfg, chunks)


def sync_config(a, config, chunks, optimizer):
    """What megatron.training.train() does with the schedule hooks before the loop."""
    if a.overlap_grad:
        config.no_sync_func = [c.no_sync for c in chunks]
        if len(chunks) == 1:
            config.no_sync_func = config.no_sync_func[0]
    config.grad_scale_func = optimizer.scale_loss


class Data:
    """Deterministic token stream; every (step, dp_rank, micro) is independent of tp/pp/ep."""

    def __init__(self, a):
        from megatron.core import parallel_state as ps

        self.a, self.dp = a, ps.get_data_parallel_rank()
        self.dp_size = ps.get_data_parallel_world_size()
        self.step = 0

    def iterator(self):
        a = self.a
        for step in range(10**6):
            for m in range(a.micro):
                g = torch.Generator().manual_seed(1000 * step + self.dp * a.micro + m)
                t = torch.randint(0, a.vocab, (a.mbs, a.seq + 1), generator=g)
                yield t


def forward_step(a, data_iter, model):
    t = next(data_iter)
    tokens, labels = t[:, :-1].contiguous(), t[:, 1:].contiguous()
    pos = torch.arange(a.seq).unsqueeze(0).expand_as(tokens).contiguous()
    mask = torch.triu(torch.ones(a.seq, a.seq), diagonal=1).bool()[None, None]
    if a.cp > 1:
        tokens, labels, pos, mask = on_this_context_rank(a, tokens, labels, pos, mask)
    out = model(tokens, pos, mask, labels=labels)

    def loss_func(output_tensor):
        if a.per_token_loss:
            loss = output_tensor.float().sum()
            n = torch.tensor(output_tensor.numel(), dtype=torch.int)
            return loss, n, {"lm loss": torch.stack([loss.detach().clone(), n.float()])}
        loss = output_tensor.float().mean() / a.cp  # Megatron multiplies by cp what was divided by all tokens
        return loss, {"lm loss": loss.detach().clone()}

    return out, loss_func


def on_this_context_rank(a, tokens, labels, pos, mask):
    """The part of a batch that Megatron hands to this rank under context parallelism; the mask has columns for all ranks."""
    from context_attention import positions
    from megatron.core import parallel_state as ps

    mine = positions(a.seq, ps.get_context_parallel_rank(), a.cp)
    gathered = torch.cat([positions(a.seq, rank, a.cp) for rank in range(a.cp)])
    return tokens[:, mine], labels[:, mine], pos[:, mine], mask[:, :, mine][..., gathered]


def train(a, config, chunks, optimizer, on_step=None):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    data = Data(a)
    its = [data.iterator() for _ in chunks]
    if len(chunks) == 1:
        its = its[0]
    fb = get_forward_backward_func()
    hist = []
    for step in range(a.steps):
        for c in chunks:
            c.zero_grad_buffer()
        optimizer.zero_grad()
        losses = fb(
            forward_step_func=partial(forward_step, a),
            data_iterator=its,
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=a.micro,
            seq_length=a.seq,
            micro_batch_size=a.mbs,
            decoder_seq_length=a.seq,
            forward_only=False,
        )
        if on_step:
            on_step("after_bwd", step)
        ok, gnorm, _nz = optimizer.step()
        if on_step:
            on_step("after_opt", step)
        if losses:
            v = [d["lm loss"] for d in losses]
            v = [x[0] / x[1] if x.dim() else x for x in v]
            lv = sum(float(x) for x in v) / len(v)
        else:
            lv = None
        hist.append((lv, None if gnorm is None else float(gnorm), bool(ok)))
    return hist
