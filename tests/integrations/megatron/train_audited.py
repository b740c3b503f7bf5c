"""Train a tiny Megatron GPT on the CPU under the audit of every step: `train_audited.py FOLDER LAYOUT…`.

`LAYOUT@drift@NAME` changes one element of a weight on rank 1, `LAYOUT@partial@NAME` doubles the gradient of a parameter there
before it is clipped, `LAYOUT@norm@` clips by each rank's own norm, `LAYOUT@random@` seeds all regions alike. Each rank writes
FOLDER/LAYOUT FAULT.RANK.json: its findings.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train as trained  # noqa: E402

from trainprobe.integrations import megatron  # noqa: E402
from trainprobe.integrations.megatron_layout import bare, held_parameters  # noqa: E402

PLAN = {"level": "off", "sinks": [], "on_existing": "replace", "on_error": "raise", "audit": {"every": 1}}
STEPS, FAULTY = 5, 2


def main(folder: Path, layout: str, fault: str = "", name: str = "") -> None:
    if "--sp" in trained.LAYOUTS[layout]:
        trained.sequence_norm.install()
    training = trained.Training(layout)
    training.a.steps = STEPS
    held = {h.name: h.parameter for h in held_parameters([bare(c) for c in training.chunks], training.axes)}
    if fault == "random":
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker()
        tracker.set_states({name: torch.Generator().manual_seed(5).get_state() for name in tracker.get_states()})
    if fault == "partial":
        spoil_gradient(training.optimizer, held.get(name))

    def on_step(moment: str, step: int) -> None:
        if fault == "drift" and (moment, step) == ("after_opt", FAULTY - 1) and name in held and dist.get_rank() == 1:
            with torch.no_grad():
                held[name].view(-1)[3] += 0.1

    output = str(folder / f"{layout} {fault} probe")
    probe = megatron.attach(training.chunks, training.optimizer, {**PLAN, "output": output})
    with probe, own_norm() if fault == "norm" else contextlib.nullcontext():
        training.run(on_step)
    found = [[f.rule, f.severity, f.step, f.site.name if f.site else None, f.message] for f in probe.findings]
    (folder / f"{layout} {fault}.{dist.get_rank()}.json".replace(" .", ".")).write_text(json.dumps(found))
    trained.fresh()


def spoil_gradient(optimizer, parameter) -> None:
    """Let rank 1 take a gradient twice as large as it is, from step FAULTY on, before it is clipped."""
    run, calls = optimizer.prepare_grads, iter(range(100))

    def prepare_grads():
        if next(calls) >= FAULTY and dist.get_rank() == 1 and parameter is not None:
            parameter.main_grad.mul_(2)
        return run()

    optimizer.prepare_grads = prepare_grads


@contextlib.contextmanager
def own_norm() -> Generator[None]:
    """Leave out the sum of the squared norm over the ranks."""
    from megatron.core.optimizer import clip_grads, optimizer

    gather, whole = clip_grads.torch.distributed.all_reduce, optimizer.get_grad_norm_fp32

    def get_grad_norm_fp32(*args, **kwargs):
        clip_grads.torch.distributed.all_reduce = lambda *a, **k: None
        try:
            return whole(*args, **kwargs)
        finally:
            clip_grads.torch.distributed.all_reduce = gather

    optimizer.get_grad_norm_fp32 = get_grad_norm_fp32
    try:
        yield
    finally:
        optimizer.get_grad_norm_fp32 = whole


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for told in sys.argv[2:]:
        main(Path(sys.argv[1]), *told.split("@"))
    dist.destroy_process_group()
