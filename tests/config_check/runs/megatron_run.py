"""A Megatron-core GPT on the CPU, trained once for each change: `megatron_run.py FOLDER CHANGE…`."""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from trainprobe import ConfigChecker

warnings.filterwarnings("ignore")
VOCABULARY, LENGTH = 64, 16


def answer_for_cuda() -> None:
    """Let Megatron run without a device: where it asks for the current one, it is the CPU. No number is changed."""
    import megatron.core.tensor_parallel.random as parallel_random
    import torch

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.Tensor.cuda = lambda self, *a, **k: self
    torch.nn.Module.cuda = lambda self, *a, **k: self
    torch.cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.random.default_generator.manual_seed(int(seed))
    parallel_random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    parallel_random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *a, **k: (
        kind(self, *a, **k).replace("torch.Float", "torch.cuda.Float") if not (a or k) else kind(self, *a, **k)
    )
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        make = getattr(torch, name)
        patched = lambda *a, make=make, **k: make(*a, **{**k, "device": cpu} if str(k.get("device")).startswith("cuda") else k)  # noqa: E731
        setattr(torch, name, patched)


def build(change: str, tp: int):
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, normalization="RMSNorm",
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu, tensor_model_parallel_size=tp,
        hidden_dropout=0.2 if change == "dropout" else 0.1, attention_dropout=0.1, params_dtype=torch.float32,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False, apply_rope_fusion=False, transformer_impl="local",
        finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=VOCABULARY,
        max_sequence_length=LENGTH, position_embedding_type="rope",
    )  # fmt: skip
    model.model_type = ModelType.encoder_or_decoder
    from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes

    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if change == "weight":
        with torch.no_grad():
            model.decoder.layers[1].mlp.linear_fc2.weight[0, 0] += 1e-3
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(check_for_nan_in_grad=False), model)
    rate = 3e-3 if change == "lr" else 1e-3
    return config, wrapped, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=rate, clip_grad=1.0), [wrapped])


def batches(change: str):
    import torch

    generator = torch.Generator().manual_seed(6)
    tokens = [torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator) for _ in range(8)]
    return iter([tokens[i] for i in ([1, 0, 2, 3, 4, 5, 6, 7] if change == "order" else range(8))])


def forward_step(data, model):
    import torch

    t = next(data)
    tokens, labels = t[:, :-1].contiguous(), t[:, 1:].contiguous()
    position = torch.arange(LENGTH).unsqueeze(0).expand_as(tokens).contiguous()
    mask = torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1).bool()[None, None]
    return model(tokens, position, mask, labels=labels), lambda out: (out.mean(), {})


def train(out: Path, change: str, tp: int) -> None:
    ConfigChecker.apply_patches(on_error="raise")
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed = 8 if change == "seed" else 7
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config, model, optimizer = build(change, tp)
    config.grad_scale_func = optimizer.scale_loss
    data = batches(change)
    with ConfigChecker([model], output_zip_path=out / f"{change.replace(' ', '_')}.zip", optimizer=optimizer, on_error="raise"):
        for _ in range(4):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=partial(forward_step), data_iterator=data, model=model, num_microbatches=2,
                seq_length=LENGTH, micro_batch_size=2, forward_only=False,
            )  # fmt: skip
            optimizer.step()


def main() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    answer_for_cuda()
    dist.init_process_group("gloo")
    tp = int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    for change in sys.argv[2:]:
        train(Path(sys.argv[1]), change, tp)
    dist.destroy_process_group()


main()
