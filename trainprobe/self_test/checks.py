"""The checks of the self-test, in order. Each returns a Result; what the device raises fails that check alone."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainprobe import __version__
from trainprobe.engine.compiled import native
from trainprobe.self_test.frameworks import check_framework, installed, version_of
from trainprobe.self_test.kernels import disagreements
from trainprobe.self_test.result import CheckResult
from trainprobe.self_test.training import LARGE, QUICK, SMALL, Trained, differences, plans, train, wait

_PACKAGES = ("torch", "torch_npu", "triton", "numpy", "pyarrow", "protobuf", "mindspore")


@dataclass(slots=True)
class TestedMachine:
    """What the checks share.

    device: cpu, cuda or npu. folder: a new one for what they write. bare: the training without the tool. judged: that whose
    operators were judged. repeats: the bare training gives the same bits twice; None until that was tried.
    """

    device: str
    quick: bool
    folder: Path
    bare: Trained | None = None
    judged: Trained | None = None
    repeats: bool | None = None

    def train(self, plan: Mapping[str, Any] | None = None, **more: Any) -> Trained:
        """Train on the device (see training.train)."""
        more.setdefault("shape", QUICK if self.quick else SMALL)
        return train(self.device, plan, **more)


def checks(machine: TestedMachine) -> Iterator[tuple[str, Callable[[TestedMachine], CheckResult]]]:
    """Yield (name, check) in the order in which they run."""
    yield from (("device", device), ("repeats", repeats), ("same bits", same_bits), ("one transfer a step", one_transfer))
    yield from (("kernels", kernels), ("operators", operators), ("dump", dump), ("device and CPU", against_cpu))
    yield from (("planted infinity", planted), ("black box", black_box), ("config check", config_check), ("cost", cost))
    for name in installed():
        yield f"framework {name}", partial(check_framework, name)


def device(machine: TestedMachine) -> CheckResult:
    """What is this machine, and does the device compute at all."""
    versions = {name: version_of(name) for name in _PACKAGES}
    told = {name: version for name, version in versions.items() if version}
    x = torch.ones(8, 8, device=machine.device)
    right = bool((x @ x).sum().item() == 512.0)
    name = platform.processor() or platform.machine()
    if machine.device != "cpu":
        about = getattr(torch.get_device_module(machine.device), "get_device_name", None)
        name = str(about()) if callable(about) else machine.device
    details = [
        f"trainprobe {__version__}, {', '.join(f'{name} {version}' for name, version in told.items())}",
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {os.cpu_count()} processors",
        f"compiled parts: {'in use' if native is not None else 'not built, their twins in Python are used'}",
    ]
    numbers = {"name": name, "versions": told, "native": native is not None, "python": sys.version}
    return CheckResult("device", "pass" if right else "FAIL", f"{machine.device}, {name}", details, numbers)


def repeats(machine: TestedMachine) -> CheckResult:
    """Does the training without the tool give the same bits twice: otherwise nothing can be held against it."""
    machine.bare = machine.train()
    found = differences(machine.bare, machine.train())
    machine.repeats = not found
    if found:
        text = f"without the tool the training differs from run to run, first in {found[0]}: same bits cannot be tested"
        return CheckResult("repeats", "not run", text, ["set the device's deterministic mode and run again"])
    return CheckResult(
        "repeats", "pass", f"without the tool two trainings are equal in all {len(machine.bare.bits)} tensors and states"
    )


def same_bits(machine: TestedMachine) -> CheckResult:
    """Every bit of the training is the same with and without the tool, on every level."""
    if not machine.repeats or machine.bare is None:
        return CheckResult("same bits", "not run", "the training does not repeat itself without the tool")
    wrong: list[str] = []
    told = plans(machine.folder / "bits")
    for name, plan in told.items():
        watched = machine.train(plan)
        machine.judged = watched if "op_check" in plan else machine.judged
        found = differences(machine.bare, watched)
        wrong += [f"{name}: {len(found)} differ, first {found[0]}"] if found else []
    sentence = f"{len(machine.bare.bits)} tensors and states are bit for bit the same under each of {len(told)} plans"
    return CheckResult(
        "same bits", "FAIL" if wrong else "pass", wrong[0] if wrong else sentence, wrong[1:] or [", ".join(told)]
    )


def one_transfer(machine: TestedMachine) -> CheckResult:
    """A step crosses to the host once."""
    wrong: list[str] = []
    counts: dict[str, list[int]] = {}
    bare = machine.train(count=True).transfers
    for name in ("mix statistics", "monitor"):
        plan = {**plans(machine.folder / "transfers")[name], "native": False}
        counts[name] = [n - b for n, b in zip(machine.train(plan, count=True).transfers, bare, strict=True)]
        wrong += [f"{name}: {counts[name]} transfers in the steps"] if max(counts[name][1:]) > 1 else []
    sentence = f"the numbers of a step come to the host in one transfer, without {machine.device} being asked in between"
    return CheckResult(
        "one transfer a step", "FAIL" if wrong else "pass", wrong[0] if wrong else sentence, numbers={"counts": counts}
    )


def kernels(machine: TestedMachine) -> CheckResult:
    """Statistics and fingerprints agree with float64 on the host."""
    wrong, looked, worst = disagreements(machine.device, machine.quick)
    sentence = f"{looked} tensors: counts, extremes and fingerprints exact, sums within {worst:.1e} of float64"
    told = [f"and {len(wrong) - 20} more"] if len(wrong) > 20 else []
    outcome = "FAIL" if wrong else "pass"
    return CheckResult(
        "kernels", outcome, wrong[0] if wrong else sentence, [*wrong[1:20], *told], {"tensors": looked, "worst": worst}
    )


def operators(machine: TestedMachine) -> CheckResult:
    """The operators of a training step agree with float64 references."""
    plan = plans(machine.folder / "bits")["operators judged"]
    done = machine.judged or machine.train(plan)
    wrong = [finding.message for finding in done.findings if finding.severity == "error"]
    log = Path(plan["output"]) / "rank0" / "op_check.txt"
    lines = log.read_text().splitlines() if log.is_file() else []
    if not lines:
        return CheckResult("operators", "FAIL", "no operator was judged")
    return CheckResult(
        "operators", "FAIL" if wrong else "pass", wrong[0] if wrong else f"{len(lines)} lines of verdicts, no error", wrong[1:]
    )


def dump(machine: TestedMachine) -> CheckResult:
    """A dump is written, read, traced and compared with itself."""
    folders = [machine.folder / f"dump_{side}" for side in "ab"]
    for folder in folders:
        machine.train({"output": str(folder), "level": "mix", "summary": "both", "step": [1]})
    compared, said = run_verb("dump-compare", *map(str, folders), "-q")
    traced, _ = run_verb("nan-trace", str(folders[0]))
    right = traced == 0 and (compared == 0 or not machine.repeats)
    size = sum(path.stat().st_size for path in folders[0].rglob("*") if path.is_file())
    return CheckResult(
        "dump", "pass" if right else "FAIL", f"{said}; nothing is NaN or infinite: {traced == 0}", numbers={"bytes": size}
    )


def against_cpu(machine: TestedMachine) -> CheckResult:
    """The same program on the device and on the CPU parts by rounding alone; attention is written out, as devices fuse it."""
    if machine.device == "cpu":
        return CheckResult("device and CPU", "not run", "the device is the CPU")
    folders = {where: machine.folder / f"on_{where}" for where in ("cpu", machine.device)}
    shape = replace(QUICK if machine.quick else SMALL, attention="explicit")
    for where, folder in folders.items():
        plan = {"output": str(folder), "level": "mix", "task": "tensor", "step": [0]}
        train(where, plan, steps=1, shape=shape, foreach=False)
    code, said = run_verb("dump-compare", *map(str, folders.values()))
    first = said.splitlines()[0] if said else "dump-compare said nothing"
    return CheckResult("device and CPU", "pass" if code in (0, 1) else "FAIL", first, said.splitlines()[1:8], {"code": code})


def planted(machine: TestedMachine) -> CheckResult:
    """An infinity that one module makes is found, and that module is named."""
    plan = {"output": str(machine.folder / "planted"), "level": "off", "monitor": {"activations": True, "gradients": True}}
    done = machine.train(plan, steps=4, broken=True)
    told = [f.message for f in done.findings if f.rule == "nonfinite" and f.step == 2]
    named = [message for message in told if "layers.1.mlp" in message]
    return CheckResult("planted infinity", "pass" if named else "FAIL", (named or told or ["it was not found"])[0])


def black_box(machine: TestedMachine) -> CheckResult:
    """After an error the last steps are there, with the step that was cut short."""
    folder = machine.folder / "black_box"
    plan = {"output": str(folder), "level": "off", "monitor": {"activations": True}, "black_box": {"steps": 4}}
    with contextlib.suppress(KeyError):
        machine.train(plan, fail_at=2)
    code, said = run_verb("black-box", str(folder))
    right = "KeyError ended the training after step 2" in " ".join(said.split())  # lines break where a path is long
    return CheckResult(
        "black box",
        "pass" if right else "FAIL",
        "the error and the steps before it are told" if right else said[:300],
        numbers={"code": code},
    )


def config_check(machine: TestedMachine) -> CheckResult:
    """Two captures of the same training are equal."""
    from trainprobe.config_check.checker import ConfigChecker

    packs = [machine.folder / f"pack_{side}.zip" for side in "ab"]
    for pack in packs:
        ConfigChecker.apply_patches(on_error="raise")
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4).to(machine.device)
        ConfigChecker(
            model, output_zip_path=str(pack), micro_steps=2, captures=["hyperparameters", "dataset", "weights", "randomness"]
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.full((2, 8), float(step), device=machine.device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    code, said = run_verb(
        "config-check", "compare", *map(str, packs), "-o", str(machine.folder / "config_report"), "-f", "json"
    )
    return CheckResult("config check", "pass" if code == 0 else "FAIL", said.splitlines()[0] if said else f"exit code {code}")


def cost(machine: TestedMachine) -> CheckResult:
    """How long a step takes, without the tool and with it; a table, no verdict."""
    shape, steps = (QUICK, 5) if machine.quick else (SMALL, 12) if machine.device == "cpu" else (LARGE, 20)
    told = {"no tool": None, **{name: plan for name, plan in plans(machine.folder / "cost").items() if name in _TIMED}}
    table: dict[str, float] = {}
    for name, plan in told.items():
        seconds = machine.train(plan, steps=steps, shape=shape).seconds
        table[name] = statistics.median(seconds[2:])
        wait(machine.device)
    bare = table["no tool"]
    rows = [f"{name:<16} {1000 * seconds:9.2f} ms a step  {seconds / bare:6.2f}" for name, seconds in table.items()]
    sentence = (
        f"median of {steps - 2} steps of a GPT of {shape.layers} layers, width {shape.width}, and the ratio to a bare step"
    )
    return CheckResult("cost", "pass", sentence, rows, {"seconds": table})


_TIMED = ("L0 statistics", "mix statistics", "monitor", "audit")


def run_verb(*words: str) -> tuple[int, str]:
    """Run a verb of `trainprobe` and return its exit code and what it printed."""
    from trainprobe.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(words))
    return code, said.getvalue().strip()
