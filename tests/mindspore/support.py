"""What of a plan works under MindSpore, each field tried for real: the table in `docs/mindspore.md`.

    python -m tests.mindspore.support        # writes the table anew

A row is tried with a plan in a loop of two steps. It works where `shows` finds what the field promises in what was written;
where it does not, the cell of the table is the sentence with which the plan was refused or which the tool's own limits hold.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from trainprobe.engine.capture.mindspore.cells import COMPILED
from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.dumps.read import read
from trainprobe.errors import PlanError
from trainprobe.integrations.mindspore_limits import NOT_JUDGED_IN_A_GRAPH, WITHOUT_EFFECT, not_judged
from trainprobe.monitor.audit.relations import relation_names
from trainprobe.monitor.rules import rule_names
from trainprobe.monitor.run_folder import read_frames
from trainprobe.watching import probe_class as probe_class_of

DOC = Path(__file__).parents[2] / "docs/mindspore.md"
BEGIN, END = "<!-- made by `python -m tests.mindspore.support` -->", "<!-- end of the table -->"
PYNATIVE, GRAPH = ms.PYNATIVE_MODE, ms.GRAPH_MODE
IN_A_GRAPH = "no: inside a graph Python sees no call; MindSpore itself dumps its kernels (`kernel-dump configure`)"


class Small(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(3, 4)
        self.act = nn.ReLU()
        self.down = nn.Dense(4, 1)

    def construct(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)))


@dataclass(frozen=True, slots=True)
class Run:
    """What a loop left. calls: of the dump of step 1, by entry name. lines: all that was printed of the tool."""

    output: Path
    findings: list[Finding]
    lines: list[str]
    slots: set[str]
    meanwhile: list[str]  # files that were there while a step was on
    of_a_graph: bool

    @property
    def rank(self) -> Path:
        return self.output / "step1/rank0"

    def json(self, name: str = "dump.json") -> dict[str, Any]:
        path = self.rank / name
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def entries(self) -> dict[str, Any]:
        return self.json().get("data", {})

    @property
    def calls(self) -> list[Any]:
        return list(read(self.rank).calls)

    def has(self, text: str) -> bool:
        return any(text in name for name in self.entries)

    def leaves(self) -> Iterator[dict[str, Any]]:
        def walk(x: Any) -> Iterator[dict[str, Any]]:
            if isinstance(x, dict):
                if "dtype" in x:
                    yield x
                for inner in x.values():
                    yield from walk(inner)
            elif isinstance(x, list):
                for inner in x:
                    yield from walk(inner)

        yield from walk(self.entries)

    def stored(self) -> set[str]:
        return {leaf["data_name"] for leaf in self.leaves() if "data_name" in leaf}


def run(mode: int, output: Path, plan: dict[str, Any], inside: Callable[[Any, Any], None] | None = None, **odd: Any) -> Run:
    """Train two steps in a loop that is written out. Raises what the plan is refused with.

    odd: `nan` has a NaN among the inputs.
    """
    ms.set_context(mode=mode)
    ms.set_seed(3)
    np.random.seed(3)
    net = Small()
    net.set_train()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    numbers[0, 0] = np.nan if odd.get("nan") else 0.0
    x = ms.Tensor(numbers)

    def forward(x: Any) -> Any:
        return ops.ReduceMean()(net(x))

    gradients = ms.value_and_grad(forward, None, optimizer.parameters)
    whole = {"output": str(output), "step": [1], "on_error": "raise", "console": False, **plan}
    lines: list[str] = []
    slots: set[str] = set()
    meanwhile: list[str] = []
    probe_class = probe_class_of(net)
    with probe_class(whole) as probe:
        probe.console.write_line = lines.append
        probe.open(net, optimizer)
        for _ in range(2):
            probe.begin_step()
            loss, found = gradients(x)
            if inside is not None:
                inside(probe, loss)
            optimizer(found)
            probe.note("loss", float(loss.asnumpy()))
            meanwhile += [path.relative_to(output).as_posix() for path in output.rglob("*")]
            data = probe.end_step()
            slots |= {record.site.slot or record.site.name for record in data.records()} if data is not None else set()
    return Run(output, probe.findings, lines, slots, meanwhile, mode == GRAPH)


Shows = Callable[[Run], bool]


def size(run: Run) -> int:
    return len(run.entries)


@cache
def plain(**plan: Any) -> int:
    """How many entries a dump in PyNative mode has, the default one without a plan."""
    with tempfile.TemporaryDirectory() as folder:
        return size(run(PYNATIVE, Path(folder) / "out", plan))


def every(run: Run, holds: Callable[[dict[str, Any]], bool]) -> bool:
    """Tell whether there are tensors and this holds of each."""
    return size(run) > 0 and all(map(holds, run.leaves()))


MIX = {"level": "mix"}
ODD = {"nan_tokens": {"nan": True}}  # field → what the training needs to show it
# field, or field = value → plan, what shows that it works
CALLS: dict[str, tuple[dict[str, Any], Shows]] = {
    "level: L0": ({"level": "L0"}, lambda r: r.has("Cell.up.Dense.forward.0") and r.has("Cell.up.Dense.backward.0")),
    "level: L1": ({"level": "L1"}, lambda r: r.has("Primitive.ReLU.0.forward") and r.has("Primitive.ReLU.0.backward")),
    "level: mix": (MIX, lambda r: r.has("Cell.up") and r.has("Primitive.ReLU")),
    "task: tensor": ({"task": "tensor"}, lambda r: len(r.stored()) > 10),
    "statistics": (
        {"statistics": ["std", "zero"]},
        lambda r: every(r, lambda leaf: leaf["std"] is not None and leaf["Max"] is None),
    ),
    "histogram": ({"histogram": {"bins": 4}}, lambda r: False),
    "quantiles": ({"quantiles": [0.5]}, lambda r: False),
    "summary: checksum": ({"summary": "checksum"}, lambda r: every(r, lambda leaf: "checksum" in leaf)),
    "summary: md5": ({"summary": "md5"}, lambda r: every(r, lambda leaf: "md5" in leaf)),
    "summary: statistics_and_md5": (
        {"summary": "statistics_and_md5"},
        lambda r: every(r, lambda leaf: "md5" in leaf and leaf["Norm"] is not None),
    ),
    "micro": ({"micro": [0]}, lambda r: size(r) == plain() > 0 and plain(micro=(1,)) == 0),
    "modules": ({"modules": ["down"]}, lambda r: r.has("Cell.down") and not r.has("Cell.up")),
    "ops": ({"level": "L1", "ops": ["Primitive.ReLU"]}, lambda r: r.has("ReLU") and not r.has("MatMul")),
    "parameters": ({"parameters": ["up.weight"]}, lambda r: [*r.entries["Cell.up.Dense.parameters_grad.0"]] == ["weight"]),
    "phases": ({"phases": ["forward"]}, lambda r: size(r) > 0 and not r.has("backward") and not r.has("parameters_grad")),
    "data: parameters": ({"data": ["parameters"]}, lambda r: "weight" in str(r.entries["Cell.up.Dense.forward.0"])),
    "data: parameter_gradients": ({"data": ["parameter_gradients"]}, lambda r: r.has("Cell.up.Dense.parameters_grad.0")),
    "entry_sides": (
        {"entry_sides": ["output"]},
        lambda r: size(r) > 0 and not any(e.get("input_args") or e.get("input") for e in r.entries.values()),
    ),
    "tensors": ({"tensors": ["up"]}, lambda r: len(r.stored()) > 0 and all("up" in name for name in r.stored())),
    "tensor_entries": (
        {"tensor_entries": ["Cell.up."]},
        lambda r: len(r.stored()) > 0 and all("Cell.up." in name for name in r.stored()),
    ),
    "details": (
        {"details": [{"match": "up", "summary": "checksum"}]},
        lambda r: {leaf["Max"] is None for leaf in r.leaves()} == {True, False},
    ),
    "slice": (
        {"task": "tensor", "tensor_format": "npy", "slice": [{"dim": 0, "begin": 0, "end": 1}]},
        lambda r: all(np.load(f).shape[0] == 1 for f in (r.rank / "dump_tensor_data").glob("*output.npy")) and bool(r.stored()),
    ),
    "tensor_format: safetensors": ({"task": "tensor"}, lambda r: (r.rank / "tensors.safetensors").exists()),
    "tensor_format: npy": (
        {"task": "tensor", "tensor_format": "npy"},
        lambda r: bool([*(r.rank / "dump_tensor_data").glob("*.npy")]),
    ),
    "tensor_format: pt": ({"task": "tensor", "tensor_format": "pt"}, lambda r: False),
    "max_bytes": ({"task": "tensor", "max_bytes": 10}, lambda r: any("max_bytes is 10" in f.message for f in r.findings)),
    "stacks": ({}, lambda r: "support.py" in str(r.json("stack.json"))),
    "construct": ({}, lambda r: r.json("construct.json")["Cell.act.ReLU.forward.0"] == "Cell.root.Small.forward.0"),
    "ops_scope": ({"level": "L1", "ops_scope": "core"}, lambda r: False),
    "scope": (
        {"scope": ["Cell.up.Dense.forward.0", "Cell.up.Dense.forward.0"]},
        lambda r: r.has("Cell.up.Dense.forward.0") and not r.has("Cell.down"),
    ),
    "entries": ({"entries": ["Cell.down."]}, lambda r: r.has("Cell.down.") and not r.has("Cell.up.")),
    "nan_tokens": ({"nan_tokens": True}, lambda r: '"Max": NaN' in (r.rank / "dump.json").read_text()),
    "recompute": ({"recompute": "skip"}, lambda r: size(r) == plain()),  # of cells that run again: tests/mindspore/test_model
    "native": ({"native": False}, lambda r: size(r) == plain()),
    "monitor: activations": ({"level": "off", "monitor": {"activations": True}}, lambda r: has_slot(r, "output")),
    "monitor: activation_gradients": (
        {"level": "off", "monitor": {"activation_gradients": True}},
        lambda r: has_slot(r, "grad_output"),
    ),
}
ANYWHERE: dict[str, tuple[dict[str, Any], Shows]] = {
    "level: off": ({"level": "off"}, lambda r: not (r.output / "step1").exists()),
    "record": ({"record": "nothing", "monitor": True}, lambda r: not (r.output / "step1").exists() and bool(frames(r))),
    "output": ({"level": "off", "monitor": True}, lambda r: (r.output / "rank0").exists()),
    "on_existing": ({"level": "off", "on_existing": "continue", "monitor": True}, lambda r: frames(r) == [0, 1]),
    "step": ({"level": "off", "monitor": {"step": [1]}}, lambda r: frames(r) == [1]),
    "rank": ({"level": "off", "monitor": True, "rank": [1]}, lambda r: not (r.output / "rank0").exists()),
    "sinks": ({"level": "off", "monitor": True, "sinks": ["jsonl"]}, lambda r: bool([*r.output.glob("rank0/*.jsonl")])),
    "join_runs": ({"level": "off", "monitor": True, "join_runs": False}, lambda r: frames(r) == [0, 1]),
    "csv_layout": (
        {"level": "off", "monitor": True, "sinks": ["csv"], "csv_layout": "wide"},
        lambda r: bool([*r.output.rglob("*.csv")]),
    ),
    "csv_steps": (
        {"level": "off", "monitor": True, "sinks": ["csv"], "csv_layout": "wide", "csv_steps": 1},
        lambda r: len([*r.output.rglob("param_updated_*.csv")]) == 2,
    ),
    "console": (
        {"level": "off", "monitor": True, "console": True},
        lambda r: any("2 steps watched" in line for line in r.lines),
    ),
    "on_error": ({"level": "off", "on_error": "raise"}, lambda r: True),
    "told": ({"level": "off", "monitor": True, "told": False}, lambda r: frames(r) == [0, 1]),
    "monitor: parameters": ({"level": "off", "monitor": {"parameters": True}}, lambda r: has_slot(r, "value_after")),
    "monitor: gradients": ({"level": "off", "monitor": {"gradients": True}}, lambda r: has_slot(r, "grad")),
    "monitor: optimizer_state": (
        {"level": "off", "monitor": {"optimizer_state": True}},
        lambda r: has_slot(r, "momentum_buffer_after"),
    ),
    "monitor: update": ({"level": "off", "monitor": {"update": True}}, lambda r: has_slot(r, "update")),
    "monitor: scalars": (
        {"level": "off", "monitor": {"scalars": True}},
        lambda r: any("loss" in frame.scalars for frame in read_frames(r.output)),
    ),
    "monitor: collectives": ({"level": "off", "monitor": {"collectives": True}}, lambda r: False),
    "monitor: batches": ({"level": "off", "monitor": {"batches": True}}, lambda r: False),
    "monitor: features": ({"level": "off", "monitor": {"features": {"weights": True}}}, lambda r: False),
    "monitor: gradients: unreduced": ({"level": "off", "monitor": {"gradients": {"unreduced": True}}}, lambda r: False),
    "audit": ({"level": "off", "audit": {"every": 1}}, lambda r: any("is not judged" in f.message for f in r.findings)),
    "black_box": ({"level": "off", "black_box": True, "monitor": True}, lambda r: "rank0/black_box.ring" in r.meanwhile),
    "control": ({"level": "off", "control": 1}, lambda r: False),
    "config_check": (
        {"level": "off", "config_check": True},
        lambda r: bool([*r.output.rglob("*config_check_pack*")]),
    ),
    "op_check": ({"level": "off", "op_check": True}, lambda r: False),
    "replay": ({"level": "off", "monitor": True, "replay": True}, lambda r: False),
    "save_gate": ({"level": "off", "monitor": True, "save_gate": True}, lambda r: False),
    "skip": ({"level": "off", "monitor": True, "skip": True}, lambda r: False),
}


def frames(r: Run) -> list[int]:
    return [frame.step for frame in read_frames(r.output)]


def has_slot(r: Run, slot: str) -> bool:
    return any(slot in seen for seen in r.slots)


def tried(mode: int, name: str, **more: Any) -> str:
    """Return "yes", or why not; "" where the plan did nothing and nothing was said. more: of the plan."""
    plan, shows = {**CALLS, **ANYWHERE}[name]
    plan = {**plan, **more}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = run(mode, Path(folder) / "out", plan, **ODD.get(name, {}))
        except PlanError as refused:
            return "refused: " + str(refused).partition("cannot be carried out: ")[2]
        try:
            return "yes" if shows(done) else ""
        except (KeyError, OSError):
            return ""


@cache
def in_a_graph() -> str:
    """Return what becomes of calls in graph mode, where none is seen: one plan asks for all of them; "" if silent."""
    with tempfile.TemporaryDirectory() as folder:
        plan = {**MIX, "task": "tensor", "monitor": {"activations": True, "activation_gradients": True}}
        done = run(GRAPH, Path(folder) / "out", plan)
    seen = done.entries or any(slot.startswith(("input", "output", "grad_output")) for slot in done.slots)
    return IN_A_GRAPH if not seen and any(finding.message == COMPILED for finding in done.findings) else ""


# command → what it does with what a MindSpore training wrote; COMMANDS_RUN are tested
COMMANDS = {
    "plan, migrate": "yes",
    "report, judge, nan-trace, runs, top, csv2tb": "yes: files of both frameworks are the same",
    "black-box": "yes",
    "config-check compare": "yes, also across frameworks",
    "ckpt-compare, ckpt-show": "yes: `.ckpt` and safetensors, also across frameworks",
    "dump-compare": "yes, also across frameworks",
    "op-check DUMP": "no: operators are judged against references of torch; each primitive is listed as not checked",
    "rollout-compare": 'yes: `SingleSave(folder, fmk="mindspore")`',
    "kernel-dump": "yes, of graph mode: MindSpore writes the dump, with settings that `kernel-dump configure` makes of a plan",
    "run PLAN -- SCRIPT": "yes, of a `Model` and of MindFormers' PyNative Trainer",
    "floor": "yes, of a `Model` and of MindFormers' PyNative Trainer",
    "demo": "no: it trains with PyTorch",
}
COMMANDS_RUN = (
    *(["report", "{a}"], ["judge", "{a}"], ["nan-trace", "{a}"], ["runs", "{root}"], ["plan", "{plan}"]),
    *(["top", "{a}", "--once"], ["migrate", "{classic}"]),
    ["dump-compare", "{a}", "{b}"],
    *(["ckpt-compare", "{weights}", "{weights}"], ["ckpt-show", "{weights}"]),
    ["config-check", "compare", "{a}/config_check_pack.zip", "{b}/config_check_pack.zip"],
)
CLASSIC = {
    "PrecisionDebugger: start, stop, step, save, set_init_step, close": ("yes", "yes, without what a graph hides"),
    "start(token_range=)": ("yes", "no: a sentence says that every forward is recorded"),
    "register_custom_api, restore_custom_api": ("yes", "no: inside a graph Python sees no call"),
    "module_dump": ("refused: `modules` of a plan names the cells",) * 2,
    "monitor(model)": ("refused: ProbeCallback or `watch` watches a MindSpore training",) * 2,
    "MsprobeStep, MsprobeInitStep, seed_all, MsgConst": ("yes", "yes"),
    "save, save_grad, step of the package": (
        "yes",
        "yes, on a CPU; elsewhere by MindSpore's TensorDump, which was never seen to run",
    ),
    'SingleSave(fmk="mindspore")': ("yes", "yes, outside of the graph"),
    "TrainerMon": ("no: the import names ProbeCallback",) * 2,
    "GradComparator": ("no: the import names dump-compare",) * 2,
}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield (what, PyTorch, PyNative, graph) of each row, trying those that can be tried. Raises AssertionError for silence."""
    yield "**plan**", "", "", ""
    for name in (*ANYWHERE, *CALLS):
        here = [tried(PYNATIVE, name)]
        here.append(in_a_graph() if name in CALLS and here[0] == "yes" else tried(GRAPH, name))
        assert all(here), f"{name} does nothing under MindSpore, and nobody says so: {here}"
        yield f"`{name}`", "yes", here[0], here[1]
    for name, why in WITHOUT_EFFECT.items():
        yield f"`{name}`", "yes", f"no effect: {why}", f"no effect: {why}"
    yield "**rules** (of the series that are recorded)", "", "", ""
    for name in rule_names():
        yield f"`{name}`", "yes", "yes", "yes, of parameters, optimizer state, updates and scalars"
    yield "**relations**", "", "", ""
    for name in relation_names():
        why = not_judged().get(name)
        graph = NOT_JUDGED_IN_A_GRAPH.get(name) or why
        clips = " (judged where MindFormers' cell clips)" if name == "clipping" else ""
        yield f"`{name}`", "yes", f"no: {why}{clips}" if why else "yes", f"no: {graph}" if graph else "yes"
    yield "**commands**", "", "", ""
    for name, says in COMMANDS.items():
        yield f"`{name}`", "yes", says, says
    yield "**classic calls**", "", "", ""
    for name, says in CLASSIC.items():
        yield f"`{name}`", "yes", *says


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| | PyTorch | MindSpore, PyNative | MindSpore, graph |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows()]
    return "\n".join(lines) + "\n"


def split(text: str) -> tuple[str, str, str]:
    """Return what stands before the table of a page, the table, and what stands behind it."""
    before, _, rest = text.partition(f"{BEGIN}\n")
    inner, _, after = rest.partition(END)
    return before, inner, after


def main() -> None:
    """Write the table into the page."""
    before, _, after = split(DOC.read_text(encoding="utf-8"))
    DOC.write_text(f"{before}{BEGIN}\n{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
