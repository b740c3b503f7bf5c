"""MindFormers' classic Trainer on a tiny Llama, without and with the callback.

Arguments: the folder for what is written, and "graph" or "pynative"; the latter is started as two ranks by msrun, each with
data of its own: MindSpore does not compile this model for several ranks on a CPU. Two attributes and three settings let it run
on a CPU, for want of kernels: no fused norm, attention or rotation, float32 throughout, and overflow told by `isfinite`, as on
devices with infinities. No code of the framework is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from mindformers.core.context import build_context
from mindspore.communication import get_rank
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback

from trainprobe.integrations.mindformers import ProbeCallback
from trainprobe.integrations.mindspore_place import declared_place

WORDS, LENGTH, BATCH = 64, 8, 2


class Data:
    def __init__(self, steps: int, rank: int) -> None:
        self.ids = np.random.default_rng(3 + rank).integers(1, WORDS, (steps * BATCH, LENGTH + 1)).astype(np.int32)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[np.ndarray]:
        return (self.ids[i],)


class OnCpu(Callback):
    """Has overflow told by `isfinite`, and keeps what the framework reports."""

    def __init__(self) -> None:
        self.reports: list[list[float | None]] = []
        self.numbers: list[int] = []
        self.held: list[str] = []

    def on_train_begin(self, run_context: Any) -> None:
        cell = run_context.original_args().train_network
        cell.ascend_910b_target, cell.enable_allfinite = True, False

    def on_train_step_end(self, run_context: Any) -> None:
        p = run_context.original_args()
        self.numbers.append(int(p.cur_step_num))
        told = [x.asnumpy().reshape(-1)[0] if isinstance(x, ms.Tensor) else x for x in p.net_outputs]
        self.reports.append([None if x is None else float(x) for x in told])

    def on_train_end(self, run_context: Any) -> None:
        cell = run_context.original_args().train_network
        held = sorted(
            (q.name, q.asnumpy().tobytes()) for q in (*cell.network.get_parameters(), *cell.optimizer.get_parameters())
        )
        self.held = [f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in held]


def train(mode: str, extra: Sequence[Any] = (), listed: Sequence[dict[str, Any]] = ()) -> OnCpu:
    ms.set_seed(7)
    np.random.seed(7)
    float32 = dict.fromkeys(
        ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype", "param_init_type"), "float32"
    )
    shape = {
        "num_layers": 2 if mode == "graph" else 1,
        "hidden_size": 32,
        "num_heads": 4,
        "vocab_size": WORDS,
        "seq_length": LENGTH,
        "batch_size": BATCH,
    }
    config = LlamaConfig(**shape, **float32, use_flash_attention=False, use_rope_slice=True, fused_rms_norm=False)
    about = TrainingArguments(
        output_dir="output", num_train_epochs=1, per_device_train_batch_size=BATCH, learning_rate=1e-3, save_strategy="no"
    )
    rank = 0 if mode == "graph" else get_rank()
    data = GeneratorDataset(Data(3 if mode == "graph" else 2, rank), ["input_ids"], shuffle=False).batch(BATCH)
    cpu = OnCpu()
    trainer = Trainer(
        args=about, task="text_generation", model=LlamaForCausalLM(config), train_dataset=data, callbacks=[cpu, *extra]
    )
    for line in listed:
        trainer.config.callbacks.append(line)
    trainer.train()
    return cpu


def main(folder: str, mode: str) -> None:
    context = {"mode": 0 if mode == "graph" else 1, "device_target": "CPU", "device_id": 0}
    parallel = {"parallel_mode": 0, "gradients_mean": True, "device_num": 2}
    sizes = {"data_parallel": 2, "model_parallel": 1, "pipeline_stage": 1}
    if mode == "graph":
        build_context({"context": context, "use_parallel": False})
    else:
        build_context({"context": context, "use_parallel": True, "parallel": parallel, "parallel_config": sizes})
    monitor = {"optimizer_state": True, "activations": mode != "graph"}
    plan = {"level": "off", "monitor": monitor, "audit": {"every": 1}, "sinks": ["jsonl"], "on_error": "raise"}
    bare = train(mode)
    given = ProbeCallback({**plan, "output": f"{folder}/given"})
    on = train(mode, [given])
    told: dict[str, Any] = {"equal": bare.held == on.held and bare.reports == on.reports, "reports": on.reports}
    told["quiet"] = [[f.rule, f.step, f.message] for f in given.findings if f.severity != "info"]
    if mode == "graph":
        listed = train(mode, listed=[{"type": "ProbeCallback", "plan": {**plan, "output": f"{folder}/listed"}}])
        told["equal"] = told["equal"] and listed.held == bare.held
        os.environ |= {"RANK_ID": "5", "RANK_SIZE": "8"}
        config = LlamaConfig(parallel_config={"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2})
        place = declared_place(SimpleNamespace(config=config))
        told["axes"] = None if place is None else place.axes
    told["held"] = hashlib.sha256("".join(on.held).encode()).hexdigest()
    print("\n" + json.dumps({**told, "numbers": on.numbers, "parameters": len(on.held)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
