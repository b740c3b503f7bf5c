"""Train a tiny Megatron mixture of experts with deeper features: `train_features.py FOLDER [bare]`, one rank.

Writes FOLDER/features.json: what the probe worked out of each router and each attention, and the same from what Megatron's own
router was seen to work with, in NumPy; and FOLDER/bits.json: a digest of all weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import numpy as np  # noqa: E402

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "megatron_cpu")]
import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()
import tiny_gpt  # noqa: E402

import trainprobe  # noqa: E402

ARGUMENTS = "--hidden 32 --ffn 48 --heads 4 --groups 2 --seq 8 --vocab 60 --vocab-div 16 --mbs 2 --micro 2 --moe 4 --layers 2"
FEATURES = {"routers": True, "attention": True, "weights": True, "formats": True}


def entropy(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return float(-(p * np.log(p)).sum(-1).mean())


def similarity(weight):
    rows = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    cosines = rows @ rows.T
    return float(cosines[np.triu_indices(len(rows), 1)].mean())


def main(folder: Path, bare: bool) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    a = tiny_gpt.parser().parse_args(ARGUMENTS.split())
    tiny_gpt.init_dist(a)
    config = tiny_gpt.make_config(a)
    chunks = tiny_gpt.build_chunks(a, config)
    names = {id(m): n for n, m in chunks[0].named_modules()}
    chunks = tiny_gpt.wrap(a, config, chunks)
    optimizer = tiny_gpt.make_optimizer(a, chunks)
    tiny_gpt.sync_config(a, config, chunks, optimizer)
    seen: list[dict] = []
    routing = TopKRouter.routing

    def kept(self, logits, *args, **kwargs):
        weight = self.weight.detach().double().numpy()
        out = routing(self, logits, *args, **kwargs)
        counts = out[1].reshape(-1, a.moe).sum(0).numpy()
        told = {"name": names[id(self)], "entropy": entropy(logits.detach().double().reshape(-1, a.moe).numpy())}
        seen.append({**told, "load": (counts / counts.sum()).tolist(), "similarity": similarity(weight)})
        return out

    TopKRouter.routing = kept
    found: list[dict] = []
    plan = {"output": folder / "out", "on_existing": "replace", "level": "off", "sinks": ["jsonl"], "on_error": "raise"}
    with contextlib.ExitStack() as stack:
        if not bare:
            probe = stack.enter_context(trainprobe.watch(chunks, optimizer, plan, monitor={"features": FEATURES}))
            probe.begin_step(0)

            def on_step(when, step):
                if when == "after_opt":
                    step_data = probe.end_step()
                    found.extend(
                        {"step": step, "name": f.name, "slot": f.slot, "call": f.call, "numbers": f.numbers.tolist()}
                        for f in step_data.features
                    )
                    if step + 1 < a.steps:
                        probe.begin_step(step + 1)

        a.steps = 2
        tiny_gpt.train(a, config, chunks, optimizer, None if bare else on_step)
    if not bare:
        (folder / "features.json").write_text(json.dumps({"seen": seen, "found": found}))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for c in chunks for p in c.parameters())).hexdigest()
    (folder / f"bits{'.bare' if bare else ''}.json").write_text(json.dumps(digest))


main(Path(sys.argv[1]), "bare" in sys.argv[2:])
