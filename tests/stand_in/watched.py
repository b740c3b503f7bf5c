"""Train a GPT on the stand-in accelerator under several plans; print as JSON what each asked of the device, and of its numbers.

    python -m tests.stand_in.watched

Of each plan: the bits of the training beside those without the tool; of each step what waited for the device, on which thread,
and how often something came to the host; and whether the numbers are those of tensors
reduced one by one, and, but for rounding, those of the same training on the CPU.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ["FAKE_NPU_COPY_DELAY_MS"] = "20"  # what is read too early is zero

import torch

import trainprobe
from tests.stand_in import register
from trainprobe.demo.gpt import GPT, Shape, next_token_loss
from trainprobe.engine.arrays.torch_arrays import STATS, TorchStatsRows
from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.core.records import Place
from trainprobe.engine.plan.defaults import default_plan
from trainprobe.engine.tape import Tape

DEVICE, STEPS = "npu:0", 3
EVERY = {"activations": True, "activation_gradients": True, "parameters": True, "gradients": True, "optimizer_state": True}
PLANS: dict[str, Mapping[str, Any]] = {
    "default plan": {**default_plan(), "sinks": ["jsonl"]},
    "monitor of everything": {"level": "off", "monitor": {**EVERY, "update": True}, "sinks": ["jsonl"]},
    "L0": {"level": "L0", "sinks": ["jsonl"]},
    "L1, both": {"level": "L1", "summary": "both", "sinks": ["jsonl"]},
}
BITS = ("checksum", "crc32")  # of values that differ by rounding
WAITS = ("stream_sync", "device_sync", "event_sync", "item", "cpu", "tolist")


class Model(torch.nn.Module):
    """A GPT whose last module overwrites what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(Shape(layers=1, width=16, heads=2, context=8, vocabulary=32))
        self.cut = torch.nn.LeakyReLU(0.1, inplace=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores, [batch, context, vocabulary]."""
        return self.cut(self.gpt(tokens) * 2)


class Asked:
    """What the training's thread asks of the device: the counters of the stand-in, and reads by Python."""

    def __init__(self, stand_in: Any) -> None:
        self._stand_in, self._read = stand_in, Counter[str]()
        for name in ("cpu", "tolist"):
            setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def _counting(self, name: str, plain: Any) -> Any:
        def call(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._read[name] += t.device.type != "cpu" and threading.current_thread() is threading.main_thread()
            return plain(t, *args, **kwargs)

        return call

    def since(self) -> dict[str, int]:
        """Return what was counted since the last call."""
        read, self._read = self._read, Counter[str]()
        told = {**self._stand_in.stats(), **read}
        return {name: told.get(name, 0) for name in (*WAITS, "d2h_async")}


def train(device: str, plan: Mapping[str, Any] | None, asked: Asked) -> tuple[list[bytes], list[dict[str, int]], list[Any]]:
    """Return the bits of the training, what each step asked of the device, and the collected steps."""
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    generator, bits, counts, collected = torch.Generator().manual_seed(0), list[bytes](), list[dict[str, int]](), list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        options = {"console": False, "on_error": "raise", **(plan or {}), "output": folder}
        with trainprobe.watch(model, optimizer, options) if plan is not None else nullcontext() as probe:
            if probe is not None:
                probe.watchers.append(lambda step_data: collected.append(step_data) or ())
            for _ in range(STEPS):
                tokens = torch.randint(0, 32, (2, 9), generator=generator).to(device)
                asked.since()
                with probe.step() if probe is not None else nullcontext():
                    optimizer.zero_grad()
                    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
                    loss.backward()
                    optimizer.step()
                counts.append(asked.since())
                bits.append(loss.detach().cpu().numpy().tobytes())
    bits += [t.detach().cpu().numpy().tobytes() for t in model.parameters()]
    bits += [t.detach().cpu().numpy().tobytes() for state in optimizer.state.values() for t in state.values()]
    return bits, counts, collected


def together() -> dict[str, Any]:
    """Return how many of 1,100 tensors that stay as they are were reduced at once, and whether each has its own numbers."""
    groups: list[int] = []
    plain = TorchStatsRows.add_all

    def counted(self: TorchStatsRows, tensors: Any, rows: Any) -> None:
        groups.append(len(tensors))
        plain(self, tensors, rows)

    TorchStatsRows.add_all = counted  # type: ignore[method-assign]
    tape = Tape(TorchLibrary())
    values = [tape.value(torch.zeros(3, device=DEVICE), STATS)]
    with tape.batched():
        values += [tape.value(torch.full((3,), float(i), device=DEVICE), STATS) for i in range(1, 1100)]
    TorchStatsRows.add_all = plain  # type: ignore[method-assign]
    about = {"framework": "pytorch", "level": "off", "task": "statistics", "statistics": ("mean",)}
    means = tape.drain(0, Place(), **about).numbers()["mean"]
    return {"groups": groups, "right": [means[value.row] for value in values] == [*range(1100)]}


def told(collected: list[Any]) -> list[str]:
    """Return all that steps tell."""
    records = (record for step_data in collected for record in step_data.records())
    return [str((r.step, r.site, r.dtype, tuple(r.shape), r.values, r.note)) for r in records]


def is_close(a: list[Any], b: list[Any]) -> bool:
    """Tell whether two runs tell of the same values in the same order, and the numbers differ by rounding."""
    pairs = list(zip((r for s in a for r in s.records()), (r for s in b for r in s.records()), strict=True))
    return all(
        (x.step, x.site, x.shape, x.dtype, x.note) == (y.step, y.site, y.shape, y.dtype, y.note)
        and x.values.keys() == y.values.keys()
        and all(k in BITS or math.isclose(v, y.values[k], rel_tol=1e-2, abs_tol=1e-4) for k, v in x.values.items())
        for x, y in pairs
    )


def main() -> None:
    """Print a line a plan."""
    asked = Asked(register())
    print(json.dumps({"plan": "together", **together()}), flush=True)
    bare, without, _ = train(DEVICE, None, asked)
    for name, plan in PLANS.items():
        bits, counts, collected = train(DEVICE, plan, asked)
        _, _, one_by_one = train(DEVICE, {**plan, "native": False}, asked)
        _, _, on_host = train("cpu", plan, asked)
        found = {
            "bits": bits == bare,
            "waits": [sum(n[w] - b[w] for w in WAITS) for n, b in zip(counts, without, strict=True)],
            "transfers": [n["d2h_async"] for n in counts],
            "audited": ["audit" in s.programs for s in collected],
            "values": [len(s.values) for s in collected],
            "steps": [s.step for s in collected],
            "as one by one": told(collected) == told(one_by_one),
            "as on the host": is_close(collected, on_host)
            if plan["level"] not in ("L1", "mix")
            else None,  # which has other ops
        }
        print(json.dumps({"plan": name, **found}), flush=True)


if __name__ == "__main__":
    main()
