"""Runs the checks and writes a line of JSON for each as it ends. Started by `trainprobe self-test`, in a process of its own.

Arguments: device, "quick" or "whole", folder. A device that is lost, or a crash, ends this process and not the command.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import orjson

from trainprobe.errors import ProbeError
from trainprobe.self_test.result import CheckResult

RESULTS, WORK = "results.jsonl", "work"
_ON_A_DEVICE = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, OSError, NotImplementedError)
_FAILS = (*_ON_A_DEVICE, AssertionError, ImportError, ArithmeticError, ProbeError)


def main() -> int:
    """Run all checks; return 0 where each could be run."""
    device, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    (folder / WORK).mkdir()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device != "npu":
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    elif importlib.util.find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import torch

    from trainprobe.self_test.checks import TestedMachine, checks

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1 if how == "quick" else min(4, os.cpu_count() or 1))
    machine = TestedMachine(device, how == "quick", folder / WORK)
    with (folder / RESULTS).open("ab") as file:
        for name, check in checks(machine):
            file.write(orjson.dumps({"begins": name}) + b"\n")
            file.flush()
            begin = time.perf_counter()
            try:
                result = check(machine)
            except _FAILS as error:
                sentence = (str(error).strip().splitlines() or [""])[0][:500]
                result = CheckResult(
                    name, "FAIL", f"{type(error).__name__}: {sentence}", traceback.format_exc().splitlines()[-12:]
                )
            result = replace(result, seconds=round(time.perf_counter() - begin, 3))
            file.write(orjson.dumps(asdict(result), default=str) + b"\n")
            file.flush()
            if name == "device" and result.outcome == "FAIL":
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
