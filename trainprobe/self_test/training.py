"""The training of the self-test: a small GPT on random tokens, with every bit of it taken down."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import trainprobe
from trainprobe.demo.gpt import GPT, Shape, next_token_loss

QUICK, SMALL = Shape(layers=2, width=16, heads=2, context=8, vocabulary=32), Shape(layers=4, width=128, heads=4, context=64)
LARGE = Shape(layers=6, width=512, heads=8, context=256)


@dataclass
class Trained:
    """What a training leaves. bits: name → dtype, shape and bytes of every loss, gradient, weight, moment and random state.

    seconds: of each step. transfers: of each step, how often a tensor of the device came to the host. findings: of the probe.
    """

    bits: dict[str, bytes] = field(default_factory=dict[str, bytes])
    seconds: list[float] = field(default_factory=list[float])
    transfers: list[int] = field(default_factory=list[int])
    findings: list[Any] = field(default_factory=list[Any])


class Broken(nn.Module):
    """A module whose output has an infinity in its third call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.inner(x)
        return (
            y if self.calls != 3 else y + torch.where(torch.arange(y.numel(), device=y.device).view_as(y) == 7, torch.inf, 0.0)
        )


def train(
    device: str,
    plan: Mapping[str, Any] | None = None,
    *,
    shape: Shape,
    steps: int = 3,
    broken: bool = False,
    count: bool = False,
    fail_at: int | None = None,
    foreach: bool | None = None,
) -> Trained:
    """Train from fixed seeds, under a plan if one is given. Raises what the device raises.

    broken: layers.1.mlp makes an infinity in step 2. count: count transfers; on the CPU, what would be one. fail_at: the step
    whose backward pass raises KeyError. foreach: of AdamW, whose own choice depends on the device.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = GPT(shape)
    if broken:
        block: Any = model.layers[1]
        block.mlp = Broken(block.mlp)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    generator = torch.Generator().manual_seed(0)
    out = Trained()
    options = {"console": False, "on_error": "raise", **plan} if plan is not None else None
    with trainprobe.watch(model, optimizer, options) if options else contextlib.nullcontext() as probe:
        for step in range(steps):
            tokens = torch.randint(0, shape.vocabulary, (4, shape.context + 1), generator=generator).to(device)
            with counted(out.transfers, device if count else ""):
                wait(device)
                begin = time.perf_counter()
                with probe.step() if probe is not None else contextlib.nullcontext():
                    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    if step == fail_at:
                        raise KeyError("raised by the self-test")
                    optimizer.step()
                    if probe is not None:
                        probe.note("loss", loss.detach())
                wait(device)
                out.seconds.append(time.perf_counter() - begin)
            out.bits[f"loss of step {step}"] = bits_of(loss)
            out.bits |= {f"gradient of {name} in step {step}": bits_of(p.grad) for name, p in model.named_parameters()}
        if probe is not None:
            probe.settle()
            out.findings = list(probe.findings)
    out.bits |= state_bits(model, optimizer, device)
    return out


def wait(device: str) -> None:
    """Wait until the device has done all that it was given."""
    if not device.startswith("cpu"):
        torch.get_device_module(device).synchronize()


@contextlib.contextmanager
def counted(into: list[int], device: str) -> Generator[None]:
    """Append how often a tensor of the device is brought to the host, or a number of it read. device: "" counts nothing."""
    if not device:
        yield
        return
    seen = [0]

    def count(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            there = args[0] if name == "copy_" and self.device.type == "cpu" else self
            seen[0] += (there.device.type != "cpu" and (name != "copy_" or there is not self)) or (
                name == "cpu" and device == "cpu"
            )
            return plain(self, *args, **kwargs)

        return call

    names = ("cpu", "item", "tolist", "copy_")
    plain = {name: getattr(torch.Tensor, name) for name in names}
    try:
        for name in names:
            setattr(torch.Tensor, name, count(name))
        yield
    finally:
        for name in names:
            setattr(torch.Tensor, name, plain[name])
        into.append(seen[0])


def bits_of(t: Tensor | None) -> bytes:
    """Return dtype, shape and raw bytes of a tensor; of no tensor, a word."""
    if t is None:
        return b"none"
    t = t.detach().cpu().contiguous()
    raw = t.reshape(-1).view(torch.uint8) if t.numel() else torch.zeros(0, dtype=torch.uint8)
    return f"{t.dtype} {tuple(t.shape)} ".encode() + raw.numpy().tobytes()


def state_bits(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> dict[str, bytes]:
    """Return the bytes of every weight, every tensor of the optimizer's state, and all random states, by name."""
    bits = {f"weight {name}": bits_of(t) for name, t in model.named_parameters()}
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, entries in optimizer.state.items():
        bits |= {f"{key} of {names[parameter]}": bits_of(torch.as_tensor(value)) for key, value in entries.items()}
    bits["torch's random state"] = bits_of(torch.get_rng_state())
    bits["Python's random state"] = repr(random.getstate()).encode()
    bits["NumPy's random state"] = repr(np.random.get_state()).encode()
    if not device.startswith("cpu"):
        state = getattr(torch.get_device_module(device), "get_rng_state", None)
        bits["the device's random state"] = bits_of(state()) if callable(state) else b"none"  # pyright: ignore[reportArgumentType]
    return bits


def differences(a: Trained, b: Trained) -> Sequence[str]:
    """Return the names of what differs between two trainings."""
    return [name for name in {**a.bits, **b.bits} if a.bits.get(name) != b.bits.get(name)]


def plans(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the plans under which the bits must stay: name → plan."""
    every = {"activations": True, "activation_gradients": True, "parameters": True, "gradients": True, "optimizer_state": True}
    told: dict[str, dict[str, Any]] = {
        "L0 statistics": {"level": "L0"},
        "L1 statistics": {"level": "L1"},
        "mix statistics": {"level": "mix"},
        "mix, fingerprints and CRC-32": {"level": "mix", "summary": "both"},
        "mix, values": {"level": "mix", "task": "tensor"},
        "monitor": {"level": "off", "monitor": every},
        "monitor with features": {
            "level": "off",
            "monitor": {"features": {"attention": True, "weights": True, "formats": True}},
        },
        "audit": {"level": "off", "audit": {"every": 1}},
        "black box": {"level": "off", "monitor": every, "black_box": {"steps": 4}},
        "operators judged": {"level": "off", "op_check": {"step": [1]}},
    }
    return {name: {"output": str(folder / name.replace(" ", "_").replace(",", "")), **plan} for name, plan in told.items()}
