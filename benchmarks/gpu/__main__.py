"""Run the parts, most important first, each in a process of its own with its own time limit.

`results.jsonl` gets a line a figure as soon as it is there, so that a run that is cut off still tells what it saw.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Annotated, Any

import orjson
import typer

from benchmarks.gpu.machine import Machine

# name → seconds on a GPU
PARTS = {"self_test": 90, "transfers": 50, "overhead": 110, "bits": 110, "kernels": 60, "operators": 60}


def main(
    output: Annotated[Path, typer.Option(help="folder of results.jsonl and log.txt")] = Path("gpu_out"),
    device: Annotated[str, typer.Option(help="cuda, npu or cpu")] = "cuda",
    rehearse: Annotated[bool, typer.Option("--rehearse", help="small sizes, on the CPU unless --device names another")] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(PARTS)}")] = None,
    share: Annotated[float, typer.Option(help="of each part's time limit, for a machine that is lent for less")] = 1.0,
    part: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run all parts, or those named by --only, and print a line for each. Exit code: 0 all bars are met, 1 not."""
    machine = Machine("cpu" if rehearse and device == "cuda" else device, rehearse, output)
    if part:
        for line in importlib.import_module(f"benchmarks.gpu.{part}").figures(machine):
            sys.stdout.write(orjson.dumps({"part": part, **line}).decode() + "\n")
            sys.stdout.flush()
        return
    output.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    with (output / "results.jsonl").open("wb") as results, (output / "log.txt").open("wb") as log:
        for name in only or PARTS:
            lines += run_part(name, machine, share * PARTS[name], results, log)
    missed = [line for line in lines if line.get("met") is False]
    print(f"{len(lines)} figures, {len(missed)} beyond their bar; {output / 'results.jsonl'}")
    raise typer.Exit(int(bool(missed)))


def run_part(name: str, machine: Machine, seconds: float, results: IO[bytes], log: IO[bytes]) -> list[dict[str, Any]]:
    """Run a part in a process for at most `seconds`; return its lines, the last of which says how it ended.

    A rehearsal has no limit but one against hanging.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", machine.device]
    command += ["--output", str(machine.output), *(["--rehearse"] if machine.rehearse else [])]
    begun = time.monotonic()
    lines: list[dict[str, Any]] = []

    def add(line: dict[str, Any]) -> None:
        lines.append(line)
        results.write(orjson.dumps(line) + b"\n")
        results.flush()
        os.fsync(results.fileno())
        print(short(line), flush=True)

    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    limit = threading.Timer(seconds if not machine.rehearse else 600, child.kill)
    limit.start()
    assert child.stdout is not None
    for raw in child.stdout:
        try:
            add(orjson.loads(raw))
        except orjson.JSONDecodeError:
            log.write(raw)
    code = child.wait()
    limit.cancel()
    how = {0: "whole", -9: "cut off by its time limit"}.get(code, f"exit code {code}: see log.txt")
    add({"part": name, "figure": "end", "how": how, "seconds": round(time.monotonic() - begun, 1), "met": code == 0})
    return lines


def short(line: dict[str, Any]) -> str:
    """Return a line for people: the mark of its bar, and all of it that is a word or a number."""
    mark = {True: "ok    ", False: "MISSED"}.get(line.get("met"), "      ")  # pyright: ignore[reportArgumentType]
    told = {key: value.get("median", value) if isinstance(value, dict) else value for key, value in line.items()}
    return f"{mark} " + " ".join(f"{key}={value}" for key, value in told.items() if key != "met")[:200]


if __name__ == "__main__":
    typer.run(main)
