"""One row of 2,048 is spoilt on rank 3 of 4, 512 rows each: is the spike told with this row and this rank, first of all?

python -m benchmarks.again.spike_rows [--seeds 20] [--only WORD]

Real processes, gloo, DistributedDataParallel. A run counts where the first finding of all ranks' records names row and rank.
A twin, the same run with nothing spoilt, counts where it has no finding; one with all rows spoilt, where it names no row.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import trainprobe
from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.monitor.findings import causes, matters

RANKS, ROWS, LENGTH, KINDS, STEPS, STRUCK, RANK = 4, 512, 9, 32, 225, 220, 3
CASES = ("own loss", "joined loss", "class of a row", "two micro-batches", "nothing spoilt", "all rows spoilt")


class Next(nn.Module):
    """Predicts the next of tokens [rows, places] that follow a rule, or one class a row."""

    def __init__(self, one: bool) -> None:
        super().__init__()
        self.one, self.embed, self.act = one, nn.Embedding(KINDS, 32), nn.GELU()
        self.up, self.head = nn.Linear(32, 64), nn.Linear(64, KINDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.act(self.up(self.embed(tokens)))
        return self.head(x[:, -1] if self.one else x)


def row_of(seed: int) -> int:
    """Return the row that is spoilt."""
    return int(torch.randint(0, ROWS, (), generator=torch.Generator().manual_seed(1000 + seed)))


def rows_of(step: int, rank: int, seed: int, case: str) -> Tensor:
    """Return tokens [ROWS, LENGTH]: each is five times the one before, plus one; those of a spoilt row are drawn."""
    drawn = torch.Generator().manual_seed(seed * 1_000_003 + step * RANKS + rank)
    rows = [torch.randint(0, KINDS, (ROWS,), generator=drawn)]
    while len(rows) < LENGTH:
        rows.append((5 * rows[-1] + 1) % KINDS)
    tokens = torch.stack(rows, 1)
    if step == STRUCK and case != "nothing spoilt":
        spoilt = tokens.clone()
        spoilt[:, 1:] = (spoilt[:, 1:] + torch.randint(1, KINDS, (ROWS, LENGTH - 1), generator=drawn)) % KINDS
        if case == "all rows spoilt":
            return spoilt
        if rank == RANK:
            tokens[row_of(seed)] = spoilt[row_of(seed)]
    return tokens


def train(rank: int, seed: int, case: str, folder: str) -> None:
    """Train one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(seed)
    model = DistributedDataParallel(Next(case == "class of a row"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = {"activations": False, "features": {"loss_rows": True}}
    plan = {"monitor": monitor, "record": "nothing", "output": f"{folder}/out", "console": False, "on_error": "raise"}
    with trainprobe.watch(model, optimizer, plan) as probe:
        for step in range(STEPS):
            with probe.step(step):
                parts = rows_of(step, rank, seed, case).chunk(2 if case == "two micro-batches" else 1)
                total = torch.zeros(())
                for tokens in parts:
                    out, y = model(tokens[:, :-1]), tokens[:, 1:]
                    loss = cross_entropy(out, y[:, -1]) if model.module.one else cross_entropy(out.flatten(0, 1), y.flatten())
                    (loss / len(parts)).backward()
                    total += loss.detach() / len(parts)
                if case == "joined loss":
                    dist.all_reduce(total)
                    total /= RANKS
                probe.note("loss", total)
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


def of_run(seed: int, case: str) -> Sequence[Finding]:
    """Return the findings of one run, the first cause first."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (seed, case, folder), nprocs=RANKS)
        return [finding for finding in causes(read_findings(Path(folder) / "out")) if matters(finding)]


def right(found: Sequence[Finding], seed: int, case: str) -> bool:
    """Tell whether the findings are those of the case."""
    if case == "nothing spoilt":
        return not found
    if case == "all rows spoilt":
        return bool(found) and not any(" row " in finding.message for finding in found)
    row, part = row_of(seed), ""
    if case == "two micro-batches":
        row, part = row % (ROWS // 2), f" in loss call {row // (ROWS // 2)}"
    rows = ROWS // 2 if part else ROWS
    return bool(found) and f"row {row} of {rows}{part} on rank {RANK} " in found[0].message


def main() -> None:
    """Print a line a run, and the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    for case in (case for case in CASES if given.only in case):
        hits = 0
        for seed in range(given.seeds):
            found = of_run(seed, case)
            hits += (hit := right(found, seed, case))
            print(f"{'right' if hit else 'WRONG':6} {case:18} {seed:3} {found[0].message[:240] if found else '-'}", flush=True)
        print(f"{case}: {hits} of {given.seeds}", flush=True)


if __name__ == "__main__":
    main()
