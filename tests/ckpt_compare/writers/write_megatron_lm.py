"""Train and save with Megatron-LM itself on a CPU: its parser, its `pretrain` and its `save_checkpoint`.

PYTHONPATH must hold a megatron-core that brings `megatron.training` along, as its wheels do from 0.17 on (they ask for Python
3.12; the Python in them runs with 3.11 too), or a checkout of Megatron-LM behind the installed megatron-core. The command line
is that of `pretrain_gpt.py`. It was core_v0.16.1 and its `pretrain_gpt.py` that wrote what the tests keep: data/megatron_lm by
one process with

    --num-layers 3 --hidden-size 48 --ffn-hidden-size 72 --num-attention-heads 6 --group-query-attention --num-query-groups 2
    --seq-length 16 --max-position-embeddings 16 --vocab-size 119 --make-vocab-size-divisible-by 8
    --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 --lr-decay-style cosine --mock-data --num-workers 0
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion --swiglu --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --use-cpu-initialization
    --no-async-tensor-model-parallel-allreduce --distributed-backend gloo --attention-dropout 0 --hidden-dropout 0
    --eval-iters 0 --eval-interval 100 --save-interval 3 --log-interval 1 --exit-signal-handler --ckpt-format torch --save DIR

and data/megatron_lm_dist.tar.xz, through `python -m tests.distributed.launch N` and with
CUDA_DEVICE_MAX_CONNECTIONS=1, by the same words but --num-layers 2 --hidden-size 20 --ffn-hidden-size 36
--num-attention-heads 2 --vocab-size 61 --make-vocab-size-divisible-by 2 --lr-decay-iters 10 --ckpt-format torch_dist, and

    tp1    one rank
    tp2    two ranks: --tensor-model-parallel-size 2 --save-interval 100 --load tp1
    dp2    two ranks: --bf16 --use-distributed-optimizer --ddp-bucket-size 3000
    full2  two ranks: as dp2, with --dist-ckpt-optim-fully-reshardable
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron_cpu"))
import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()


def allow_no_device() -> None:
    """Answer what `pretrain` asks about a GPU before it trains; no number that it trains with is touched."""
    import megatron.training.arguments as arguments
    import megatron.training.initialize as initialize
    import megatron.training.training as training
    import megatron.training.utils as utils
    from megatron.core.datasets import utils as datasets

    training.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda *_, **__: None
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    torch.cuda.memory_stats = lambda *_, **__: {}
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used"):
        setattr(torch.cuda, name, lambda *_, **__: 0)
    datasets.compile_helpers = lambda: None  # the wheel holds the compiled helpers and no Makefile
    for module in (utils, arguments):
        if hasattr(module, "get_device_arch_version"):
            module.get_device_arch_version = lambda: 9
    if hasattr(initialize, "fused_kernels"):
        initialize.fused_kernels.load = lambda _: None  # which nvcc compiles
    if hasattr(initialize, "_warmup_jit_function"):
        initialize._warmup_jit_function = lambda: None


class Texts(torch.utils.data.Dataset):
    """Random words, the same for an index on every rank."""

    def __init__(self, count: int) -> None:
        from megatron.training import get_args

        self.count, self.args = count, get_args()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(int(index))
        words = torch.randint(self.args.padded_vocab_size - 1, (self.args.seq_length + 1,), generator=chance)
        return {"tokens": words[:-1], "labels": words[1:]}


def data(counts: list[int]) -> tuple[Texts, None, None]:
    return Texts(counts[0] + 100), None, None  # a run that goes on from another one's checkpoint needs more than its own


def model(pre_process: bool = True, post_process: bool = True, **_: object) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args), get_gpt_layer_local_spec(normalization=args.normalization),
        args.padded_vocab_size, args.max_position_embeddings, pre_process, post_process, parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )  # fmt: skip


def forward(batches, gpt):
    batch = next(batches)
    length = batch["tokens"].shape[1]
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    losses = gpt(batch["tokens"], torch.arange(length).expand_as(batch["tokens"]), mask, labels=batch["labels"])
    return losses, lambda each: (each.float().mean(), {"lm loss": each.float().mean().detach()})


def main() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    allow_no_device()
    data.is_distributed = True
    pretrain(data, model, ModelType.encoder_or_decoder, forward, args_defaults={"tokenizer_type": "NullTokenizer"})
    for writer in multiprocessing.active_children():  # which would outlive this process
        writer.kill()
        writer.join()
    os._exit(0)


if __name__ == "__main__":
    main()
