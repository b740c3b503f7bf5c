"""A training loop on megatron.core under the probe: one line more than without. Needs megatron-core and a GPU.

    torchrun --nproc-per-node 1 examples/megatron_core_loop.py

Without a GPU, `tests/megatron_cpu` shows what has to answer for it: python examples/megatron_core_loop.py --cpu

Writes probe_out/rank0/metrics.csv: gradients, parameters and scalars of every step, and what the rules found.
"""

import os
import sys
from pathlib import Path

if "--cpu" in sys.argv:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "megatron_cpu"))
    import megatron_on_cpu

    megatron_on_cpu.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig

from trainprobe.integrations import megatron

LENGTH, VOCABULARY = 16, 64


def build():
    """Make a small GPT in data parallel and its optimizer."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, params_dtype=torch.float32, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH).cuda()
    model.model_type = ModelType.encoder_or_decoder
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [model])
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def forward_step(data, model):
    """Run one micro-batch: the losses, and what makes one number of them."""
    tokens = next(data)
    position = torch.arange(LENGTH, device=tokens.device).unsqueeze(0).expand(tokens.shape[0], -1)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, device=tokens.device), diagonal=1).bool()[None, None]
    losses = model(tokens[:, :-1].contiguous(), position, mask, labels=tokens[:, 1:].contiguous())
    return losses, lambda out: (out.mean(), {"lm loss": out.detach().mean()})


def batches():
    """Yield tokens [4, length + 1] that count upwards."""
    while True:
        start = torch.randint(0, VOCABULARY, (4, 1), device="cuda")
        yield (start + torch.arange(LENGTH + 1, device="cuda")) % VOCABULARY


def main() -> None:
    """Train ten steps."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo" if "--cpu" in sys.argv else "nccl")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    model, optimizer = build()
    probe = megatron.attach(model, optimizer)  # this is the line; hand it a plan as well
    data = batches()
    for step in range(10):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=2, seq_length=LENGTH,
            micro_batch_size=4, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        print(step, float(sum(row["lm loss"] for row in losses) / len(losses)))
    probe.close()
    for finding in probe.findings:
        print(finding.severity, finding.message)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
