"""Replay packs: what a call of a module was given, had and made, as a folder that can be run again in another process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch._C import DisableTorchFunction
from torch.utils import _pytree as pytree

from trainprobe.again.replay_plan import ReplayPlan
from trainprobe.again.step_again import inside_of_ranks, why_not
from trainprobe.comparison.files import writing
from trainprobe.engine.capture.held_calls import HeldCall, HeldCalls, HeldStep, HeldTensor, random_now
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Finding
from trainprobe.engine.plan.selection import parse_names, parse_steps
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Program, Schedule
from trainprobe.engine.storage.safe_files import write_whole

PACK, TENSORS, SCRIPT = "pack.json", "tensors.safetensors", "replay.py"
_PRIVATE = ("_reversed_padding_repeated_twice", "_qkv_same_embed_dim")  # attributes that torch.nn computes with
_OF_THE_TOOL = ("guard", "probe", "plan", "kernels")


class Packing(Program):
    """Writes the pack of the first step with an error, or of each chosen step."""

    def __init__(self, plan: ReplayPlan) -> None:
        super().__init__("replay", Schedule(), part="the replay pack")
        self.plan = plan
        self._steps = parse_steps(plan.step)
        self._roots: list[Any] = []
        self._begin: dict[str, Any] = {}  # random states as the step began
        self._came: tuple[HeldStep | None, dict[str, Any]] = None, {}  # of the step whose numbers have come
        self._seen = 0
        self._written = False

    def attached(self, probe: EngineProbe) -> None:
        """Have calls held under a guard of their own."""
        self._probe = probe
        self._calls = HeldCalls(probe.guard.of(self.part), parse_names(self.plan.modules), self.plan.megabytes * 10**6)

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """Learn the model."""
        self._roots = [inside_of_ranks(root) for root in chunks_of(model)]

    def begins(self, step: int) -> None:
        """Hold a step."""
        self._calls.end()
        if step not in self._steps or self._written:
            return
        why = why_not(self._roots)
        if why:
            self._say(f"steps {why.replace('run again', 'packed')}")
            return
        self._begin = _random_states()
        self._calls.begin(step, self._roots)

    def paused(self) -> None:
        """Hold no call for a while."""
        self._calls.paused += 1

    def resumed(self) -> None:
        """Hold calls again."""
        self._calls.paused -= 1

    def collected(self) -> Callable[[Any], object] | None:
        """Return what hands over the held step once its numbers have come."""
        held = self._calls.step, self._begin

        def came(step_data: Any) -> None:
            self._came = held

        return came

    def decide(self, found: Sequence[Finding]) -> tuple[int, None]:
        """Write the pack of a step in which an error was found."""
        self._consider(*self._came)
        self._came = None, {}
        return 0, None

    def ended(self, step: int, complete: bool) -> None:
        """Write the pack of a step that was asked for; let go of the step."""
        held = self._calls.end()
        if self._probe.guard.of(self.part).tripped is None:
            self._consider(held, self._begin)
            if held is not None and self.plan.on == "step":
                self._write(held, self._begin, [call for call in held.calls if call.inner], [])

    def dropped(self) -> None:
        """Forget the step."""
        self._calls.end()

    def closed(self) -> None:
        """Let go of everything."""
        self._calls.end()

    def _consider(self, step: HeldStep | None, begin: dict[str, Any]) -> None:
        """Write a pack where an error of the training was found since the last look."""
        found = self._probe.findings[self._seen :]
        self._seen += len(found)
        errors = [f for f in found if f.severity == "error" and f.rule not in _OF_THE_TOOL]
        if step is not None and errors and self.plan.on == "error" and not self._written:
            self._written = True
            call = offender(step.calls, errors)
            self._write(step, begin, [call] if call is not None else [], [f.message for f in errors[:4]])

    def _write(self, step: HeldStep, begin: dict[str, Any], calls: Sequence[HeldCall], found: Sequence[str]) -> None:
        place = self._probe.place
        folder = Path(self._probe.plan.output) / "replay" / f"step{step.number}" / f"rank{place.rank}"
        about: dict[str, Any] = {"step": step.number, "rank": place.rank, "findings": found, "left_out": list(step.left_out)}
        tensors = {f"random.{name}": t for name, t in begin.items()}
        with torch.no_grad(), DisableTorchFunction():
            about["batch"] = _tree(step.batch, "batch", tensors)
            about["calls"] = [_told(call, str(i), tensors) for i, call in enumerate(calls)]
            write_pack(folder, about, tensors)
        lacks = f"; not held: {next(iter(step.left_out))}" if step.left_out else ""
        of = calls[0].name if len(calls) == 1 else f"{len(calls)} calls"
        self._say(f"step {step.number}: {of} packed{lacks}", f"`trainprobe replay {folder.parent} --double`")

    def _say(self, text: str, following: str | None = None) -> None:
        self._probe.report_once(Finding("replay", "info", text, self._probe.step_number, self._probe.place, next=following))


def offender(calls: Sequence[HeldCall], found: Sequence[Finding]) -> HeldCall | None:
    """Return the first call that made a value which is not finite from values that are, else the one that a finding names."""
    bad = [call for call in calls if not _finite(call.made)]
    made = next((call for call in bad if _finite([call.given, list(call.state.values())])), bad[0] if bad else None)
    names = [f.site.name for f in found if f.site is not None]
    named = [call for name in names for call in calls if call.name in (name, name.rpartition(".")[0])]
    return next(iter([*filter(None, [made]), *named, *reversed([call for call in calls if call.inner])]), None)


def _finite(tree: Any) -> bool:
    held = [x for x in pytree.tree_leaves(tree) if isinstance(x, HeldTensor) and x.stands]
    return all(bool(x.tensor.isfinite().all()) for x in held)


def write_pack(folder: Path, about: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write tensors and script, and at last `pack.json`. Raises OutputError."""
    from safetensors.torch import save

    document = {"format": 1, "torch": torch.__version__, "threads": torch.get_num_threads(), **about}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / TENSORS, save(dict(tensors)))
        write_whole(folder / SCRIPT, Path(__file__).with_name("rebuild.py").read_bytes())
        write_whole(folder / PACK, orjson.dumps(document, option=orjson.OPT_INDENT_2))


def _told(call: HeldCall, at: str, tensors: dict[str, Any]) -> dict[str, Any]:
    tensors |= {f"{at}.random.{name}": t for name, t in call.random.items()}
    _tree(call.state, f"{at}.state", tensors)
    args, kwargs = _tree(call.given, f"{at}.input", tensors, {})
    device = next((x.tensor.device.type for x in pytree.tree_leaves(call.made) if isinstance(x, HeldTensor)), "")
    about = {"name": call.name, "number": call.number, "device": device, "autocast": call.autocast}
    made = _tree(call.made, f"{at}.output", tensors)
    return {**about, "module": _described(call.module), "args": args, "kwargs": kwargs, "outputs": made}


def _tree(x: Any, name: str, tensors: dict[str, Any], once: dict[int, str] | None = None) -> Any:
    """Return a nest as JSON has it, and add its tensors: {"tensor": NAME}, or {"unknown": WHY} for what cannot be kept.

    once: held tensor → its name; where it is given, one that comes again is not kept again.
    """
    if isinstance(x, HeldTensor):
        if not x.stands:
            return {"unknown": "it was written in place afterwards"}
        if once is not None and once.setdefault(id(x), name) != name:
            return {"tensor": once[id(x)]}
        tensors[name] = x.tensor.cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(x, Mapping):
        return {"mapping": {str(key): _tree(value, f"{name}.{key}", tensors, once) for key, value in x.items()}}
    if isinstance(x, list | tuple):
        return [_tree(value, f"{name}.{i}", tensors, once) for i, value in enumerate(x)]
    return x if _plain(x) else {"unknown": f"a {type(x).__name__} is not kept"}


def _described(module: Any) -> dict[str, Any]:
    """Return what makes a module again without calling its constructor: class, plain attributes, children."""
    kept = {n: v for n, v in vars(module).items() if (not n.startswith("_") or n in _PRIVATE) and _plain(v)}
    kept |= {n: None for held in (module._parameters, module._buffers) for n, t in held.items() if t is None}
    children = {name: _described(child) for name, child in module.named_children()}
    return {"class": f"{type(module).__module__}.{type(module).__qualname__}", "attributes": kept, "children": children}


def _plain(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return len(x) <= 64 and all(_plain(y) for y in x)
    return x is None or type(x) in (bool, float, str) or (type(x) is int and abs(x) < 1 << 63)


def _random_states() -> dict[str, Any]:
    """Return generator → state: of Python (int64 [625]), NumPy (int64 [625]: keys and position) and torch (uint8)."""
    numpy: Any = np.random.get_state()
    return {"python": torch.tensor(random.getstate()[1]), "numpy": torch.tensor([*numpy[1].tolist(), numpy[2]]), **random_now()}
