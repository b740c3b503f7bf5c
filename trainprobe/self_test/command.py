"""`trainprobe self-test`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from trainprobe.errors import MissingExtra, OutputError, UsageError
from trainprobe.self_test.child import RESULTS
from trainprobe.self_test.result import CheckResult

DEVICES = ("cpu", "cuda", "npu")
_LARGEST_LOG = 1 << 20


def self_test(
    device: Annotated[str, typer.Option("--device", "-d", help="cpu, cuda or npu")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="a few seconds: small tensors, no training frameworks")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the zip file to write")] = None,
    limit: Annotated[int, typer.Option(help="seconds after which to give up on a device that does not answer")] = 1200,
) -> int:
    """Verify the whole tool on a device, and write one zip file to send back. Exit code: 0 what ran passed, 1 something failed.

    The file holds versions, the device's name, timings, verdicts and what the checks printed; no data and no code of yours.
    """
    if device not in DEVICES:
        raise UsageError(f"--device {device} is none of {', '.join(DEVICES)}")
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "torch", "the self-test")
    target = output or Path(f"trainprobe-self-test-{device}-{time.strftime('%Y%m%d-%H%M%S')}.zip")
    if target.exists():
        raise OutputError(f"{target} exists and is left as it is: name another with --output")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    with tempfile.TemporaryDirectory(prefix="trainprobe-self-test-") as folder:
        results = run_child(device, quick, Path(folder), limit, console)
        counts = Counter(result.outcome for result in results)
        last = f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['not run']} not run; send back {target}"
        text = "\n".join([*(line for result in results for line in result.lines()), last, ""])
        write_zip(target, text, results, Path(folder))
    console.print(last)
    return int(counts["FAIL"] > 0)


def run_child(device: str, quick: bool, folder: Path, limit: int, console: Console) -> list[CheckResult]:
    """Run the checks in a process of their own, print what they say and return it."""
    results: list[CheckResult] = []
    for result in results_of(device, quick, folder, limit):
        results.append(result)
        for line in result.lines():
            console.print(line)
    return results


def results_of(device: str, quick: bool, folder: Path, limit: float) -> Iterator[CheckResult]:
    """Run the checks in a process of their own and yield what each says as it ends; limit: in seconds.

    Where the process ends early, the check it was in fails.
    """
    command = [sys.executable, "-m", "trainprobe.self_test.child", device, "quick" if quick else "whole", str(folder)]
    path, begun, read, end = folder / RESULTS, "", 0, time.monotonic() + limit
    with (folder / "log.txt").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as child:
        ended = False
        while not ended:
            ended = child.poll() is not None
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
            for line in lines[read:]:
                told = orjson.loads(line)
                begun = told.get("begins", "")
                if not begun:
                    yield CheckResult(**told)
            read = len(lines)
            if not ended and time.monotonic() > end:
                child.kill()
                child.wait()
                break
            time.sleep(0.0 if ended else 0.05)
    if child.returncode != 0:
        late = f"did not answer within {limit:g} seconds and was ended"
        how = late if child.returncode == -9 else f"ended with {child.returncode}"
        shown = (folder / "log.txt").read_bytes()[-_LARGEST_LOG:].decode("utf-8", "replace").splitlines()
        yield CheckResult(begun or "start", "FAIL", f"the process {how}", shown[-12:])


def write_zip(target: Path, text: str, results: list[CheckResult], folder: Path) -> None:
    """Write the report as text and as JSON, and the log of the checks."""
    from dataclasses import asdict

    content = orjson.dumps([asdict(result) for result in results], option=orjson.OPT_INDENT_2)
    with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("report.txt", text)
        archive.writestr("report.json", content)
        archive.writestr("log.txt", (folder / "log.txt").read_bytes()[-_LARGEST_LOG:])
