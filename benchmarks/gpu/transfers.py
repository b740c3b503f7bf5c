"""What the tool asks of the device in a step: synchronisations, transfers to the host, kernels, by torch's profiler."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch

import trainprobe
from benchmarks.gpu.machine import Machine, prepare
from benchmarks.gpu.overhead import VARIANTS

STEPS = 2
_SHOWN = ("no tool", "default plan")  # whose longest entries go to profiles.txt: a table takes seconds
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def figures(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a line a plan: counts a step beyond those of the bare training, and whether the bars are met."""
    bare = counted(machine, None, "no tool")
    yield {"figure": "transfers", "variant": "no tool", **bare}
    for name, (plan, _) in VARIANTS.items():
        begun = time.monotonic()
        seen = counted(machine, plan, name)
        more = {key: round(seen[key] - bare[key], 2) for key in seen}
        transfers = 0 if name == "idle" else 1
        met = more["waits in the step"] <= 0 and more["to host"] <= transfers
        yield {
            "figure": "transfers",
            "variant": name,
            **more,
            "seconds": round(time.monotonic() - begun, 1),
            "met": met if machine.device == "cuda" else None,
        }


def counted(machine: Machine, plan: Mapping[str, Any] | None, name: str) -> dict[str, float]:
    """Return what is in the trace of the steps from 3 on, a step. Waits count on the training's thread alone."""
    with tempfile.TemporaryDirectory() as folder:
        training = prepare(machine, "small", "bf16")
        options = {"console": False, "on_error": "raise", **(plan or {}), "output": f"{folder}/out"}
        watched = trainprobe.watch(training.model, training.optimizer, options) if plan is not None else None
        with watched if watched is not None else contextlib.nullcontext() as probe:
            for i in range(3):
                with probe.step() if probe is not None else contextlib.nullcontext():
                    training.step(i)
            if probe is not None:
                probe.flush()
            machine.wait()
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if machine.device == "cuda" else []
            with torch.profiler.profile(activities=kinds) as profile:
                for i in range(3, 3 + STEPS):
                    watch = probe.step() if probe is not None else contextlib.nullcontext()
                    with torch.profiler.record_function("training step"), watch:
                        training.step(i)
                machine.wait()
        if name in _SHOWN:
            order = "self_cuda_time_total" if machine.device == "cuda" else "self_cpu_time_total"
            table = profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)
            with (machine.output / "profiles.txt").open("a", encoding="utf-8") as file:
                file.write(f"\n{name}\n{table}\n")
        profile.export_chrome_trace(f"{folder}/trace.json")
        return _counts(orjson.loads(Path(f"{folder}/trace.json").read_bytes())["traceEvents"])


def _counts(events: list[dict[str, Any]]) -> dict[str, float]:
    spans = [e for e in events if e.get("name") == "training step" and e.get("cat") == "user_annotation"]
    seen: Counter[str] = Counter()
    for event in events:
        category, name = event.get("cat", ""), event.get("name", "")
        inside = any(
            event.get("tid") == span["tid"] and span["ts"] <= event.get("ts", 0) <= span["ts"] + span["dur"] for span in spans
        )
        if category == "cuda_runtime" and name in _WAITS and inside:
            seen["waits in the step"] += 1
        elif category == "gpu_memcpy" and "DtoH" in name:
            seen["to host"] += 1
        elif category == "kernel":
            seen["kernels"] += 1
        elif category == "gpu_memcpy" and "HtoD" in name:
            seen["to device"] += 1
    return {key: seen[key] / STEPS for key in ("waits in the step", "to host", "to device", "kernels")}
