"""Replay packs: five faults and their healthy twins, each pack replayed in another process.

python -m benchmarks.again.replay [--seeds 3] [--only WORD]

A fault counts where the replay has the bits of the training and names its class. A twin counts where it names none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import trainprobe
from benchmarks.again.replay_models import LogOfPart, Projection

STEPS, STRUCK = 4, 2
MODELS = "benchmarks.again.replay_models"
MONITORED = {"monitor": {"gradients": True, "parameters": True, "scalars": True, "activations": False}}
FAULTS = {
    **{"log of zero": "op", "bfloat16 overflow": "precision", "poisoned row": "data"},
    **{"flipped weight": "hardware", "wrong kernel": "op"},
}
Change = Callable[[nn.Module, Tensor, int], Tensor]


def train(
    model: nn.Module, batches: Callable[[int], Tensor], folder: Path, plan: dict[str, Any], change: Change, lr: float = 1e-3
) -> Any:
    """Train a few steps. change: is given the model, the batch and the step in front of each step; returns the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with trainprobe.watch(model, optimizer, {"output": folder, "console": False, "on_error": "raise", **plan}) as probe:
        for step in range(STEPS):
            x = change(model, batches(step), step)
            with probe.step():
                optimizer.zero_grad()
                loss = model(x).float().square().mean()
                probe.note("loss", loss)
                loss.backward()
                optimizer.step()
    return probe


def body(seed: int, last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 20), nn.LayerNorm(20), nn.GELU(), last)


def data(seed: int, width: int = 16) -> Callable[[int], Tensor]:
    return lambda step: torch.randn(8, width, generator=torch.Generator().manual_seed(1000 * seed + step))


def log_of_zero(seed: int, folder: Path, broken: bool) -> None:
    def change(model: nn.Module, x: Tensor, step: int) -> Tensor:
        model[3].offset = 0.0 if broken and step == STRUCK else 1e-3  # type: ignore[index]
        return x

    train(body(seed, LogOfPart(1e-3)), data(seed), folder, plan(broken), change)


def overflow(seed: int, folder: Path, broken: bool) -> None:
    def change(model: nn.Module, x: Tensor, step: int) -> Tensor:
        if broken and step == STRUCK:
            with torch.no_grad():
                model[2].weight.mul_(2e36)  # type: ignore[index, union-attr]
        return x.bfloat16() * 300

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    train(model, data(seed), folder, plan(broken), change, lr=1e-9)


def poisoned(seed: int, folder: Path, broken: bool) -> None:
    def change(model: nn.Module, x: Tensor, step: int) -> Tensor:
        if broken and step == STRUCK:
            x[3 + seed % 3] = (float("nan"), float("inf"), 1e30)[seed % 3]
        return x

    train(nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 4)), data(seed), folder, plan(broken), change)


def wrong_kernel(seed: int, folder: Path, broken: bool) -> None:
    asked = {"replay": {"on": "step", "step": [STRUCK], "modules": ["3"]}}
    train(body(seed, Projection(20, 4, broken)), data(seed), folder, asked, lambda model, x, step: x)


def on_rank(rank: int, store: str, seed: int, folder: str, broken: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(seed)

    def change(model: nn.Module, x: Tensor, step: int) -> Tensor:
        if broken and step == STRUCK and rank == seed % 2:
            weight: Any = model.module[2].weight  # type: ignore[union-attr, index]
            weight.data.view(torch.int32).view(-1)[5 + seed] ^= 1 << (12 + 3 * seed)
        return x

    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 4)))
    more = {"audit": {"every": 1}, "replay": True} if broken else {"replay": {"on": "step", "step": [STRUCK], "modules": ["2"]}}
    train(model, data(seed + 10 * rank), Path(folder), more, change)
    dist.destroy_process_group()


def flipped(seed: int, folder: Path, broken: bool) -> None:
    store = tempfile.mkdtemp()
    mp.spawn(  # pyright: ignore[reportPrivateImportUsage]
        on_rank, (f"{store}/store", seed, str(folder), broken), 2
    )


def plan(broken: bool) -> dict[str, Any]:
    """Return the plan of a training: a pack with the first error, or of a step of a healthy one."""
    return {**MONITORED, "replay": True if broken else {"on": "step", "step": [STRUCK]}}


TRAININGS = dict(zip(FAULTS, (log_of_zero, overflow, poisoned, flipped, wrong_kernel), strict=True))


def replayed(pack: Path) -> dict[str, Any]:
    """Replay a pack in another process; return its answer."""
    answer = pack.parent / "answer.json"
    words = [sys.executable, "-m", "trainprobe", "replay", str(pack), "--double", "--import", MODELS, "--json", str(answer)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    return json.loads(answer.read_text()) if answer.exists() else {"sentence": done.stderr.strip()[-300:]}


def main() -> None:
    """Print a line a case, and the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    named = quiet = same = cases = 0
    for name, make in TRAININGS.items():
        for seed in range(given.seeds if given.only in name else 0):
            for broken in (True, False):
                torch.manual_seed(seed)
                folder = Path(tempfile.mkdtemp())
                make(seed, folder / "run", broken)
                packs = sorted((folder / "run" / "replay").glob("step*"))
                answer = replayed(packs[0]) if packs else {"sentence": "no pack was written"}
                right = answer.get("class") == (FAULTS[name] if broken else "none")
                named, quiet = named + (right and broken), quiet + (right and not broken)
                same, cases = same + bool(answer.get("reproduced")), cases + 1
                kind = "fault" if broken else "healthy"
                print(
                    f"{kind:8}{name:20}{seed} {'right' if right else 'WRONG':6} {answer.get('sentence', '')[:220]}", flush=True
                )
    print(f"faults named by class: {named} of {cases // 2}")
    print(f"healthy twins with no class: {quiet} of {cases // 2}")
    print(f"reproduced bit for bit in another process: {same} of {cases}")


if __name__ == "__main__":
    main()
