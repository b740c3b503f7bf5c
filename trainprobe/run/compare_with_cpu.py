"""The classic fronts that check operators while a training runs: `CompareWithCPU`, `NanInfTracker`, `open_module_tracker`.

    trainprobe.open_module_tracker(model)
    with trainprobe.CompareWithCPU(start_step=5, end_step=7) as compare:
        for batch in data:
            train(batch)
            compare.step()

What ran is looked at when `step` is called or the block ends; until then nothing is computed besides the training. The
training's bits stay what they are.
"""

from __future__ import annotations

import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.core.step_data import leaves, numbers_of_rows
from trainprobe.engine.core.topology import place_from_environment
from trainprobe.errors import StopTraining, UsageError
from trainprobe.op_check.plan import OpCheckPlan
from trainprobe.op_check.program import Log, OpCheckProgram
from trainprobe.watching import Probe

if TYPE_CHECKING:
    from trainprobe.engine.storage.writer import Writer
    from trainprobe.engine.tape import Tape

CLASSIC_TOLERANCE = 1e-3  # for the one of atol and rtol that is left out
_tracked: weakref.ref[Any] | None = None


def open_module_tracker(model: Any) -> None:
    """Have log lines of `CompareWithCPU` and `NanInfTracker` blocks that begin later name the modules of this model."""
    global _tracked
    _tracked = weakref.ref(model)


@dataclass(slots=True)
class ModuleInfo:
    """A module and those around it, for scripts that import this name; log lines name modules by their paths."""

    name: str
    father: ModuleInfo | None = None
    is_leaf: bool = False
    is_forward: bool = True
    children: list[ModuleInfo] = field(default_factory=list["ModuleInfo"])

    def name_with_prefix(self) -> str:
        """Return the names of all modules around it and its own."""
        around = self.father.name_with_prefix() if self.father is not None else ""
        return f"{around}/{self.name}" if around else self.name

    def full_name(self) -> str:
        """Return that with (forward) or (backward)."""
        forward = self.father.is_forward if self.is_leaf and self.father is not None else self.is_forward
        return f"{self.name_with_prefix()}({'forward' if forward else 'backward'})"


class _Front(ABC):
    """Looks at chosen steps between `with` and the block's end. See the classes below for the arguments."""

    file = ""

    def __init__(
        self,
        enabled: bool,
        enable_ranks: Sequence[int] | None,
        should_log_to_file: bool,
        output_dir: str | Path,
        start_step: int | None,
        end_step: int | None,
        model: Any,
    ) -> None:
        first = start_step or 0
        if end_step is not None and end_step <= first:
            raise UsageError(f"end_step={end_step} does not come after start_step={first}: no step would be looked at")
        self._steps = f"every 1 from {first}" if end_step is None else f"every 1 from {first} to {end_step - 1}"
        self._enabled = enabled
        self._ranks = ("all",) if enable_ranks is None else tuple(enable_ranks)
        self._to_file = should_log_to_file
        self._folder = Path(output_dir or ".")
        self._model = model
        self._log: Log | None = None
        self._probe: Probe | None = None
        self._stepped = False

    @abstractmethod
    def _make(self, level: Literal["L1", "mix"]) -> Probe:
        """Return the probe that looks."""

    def __enter__(self) -> Any:
        if self._enabled:
            model = self._model if self._model is not None else _tracked() if _tracked is not None else None
            self._probe = self._make("L1" if model is None else "mix")
            if model is not None:
                self._probe.open(model)
            self._probe.begin_step(0)
        return self

    def step(self) -> None:
        """End a step of the training: look at what ran, if the step was chosen, and begin the next one."""
        if self._probe is not None:
            self._stepped = True
            self._probe.end_step()
            self._probe.begin_step()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        probe, self._probe = self._probe, None
        if probe is None:
            return
        try:
            tape = self._tape(probe)
            if error is None and self._stepped and tape is not None and not tape.calls:
                probe.drop_step()  # `step` ended the last one, and nothing ran after it
            probe.end_step(complete=error is None)
        finally:
            probe.close()
            for sentence in probe.sentences:
                self._say(sentence)
            if self._log is not None:
                self._log.close()

    def _tape(self, probe: Probe) -> Tape | None:
        """Return the tape of the step that has begun, None where it is not collected."""
        return probe.tape

    def _say(self, text: str) -> None:
        """Write a line to the log file, or to standard output."""
        if not self._to_file:
            _to_standard_output(text)
            return
        if self._log is None:
            place = place_from_environment()
            rank = f"_rank{place.rank}" if place.world_size > 1 else ""
            self._log = Log(self._folder / f"{self.file}{rank}.txt", time.strftime("%Y-%m-%d %H:%M:%S"))
        self._log(text)

    def _report(self, finding: Finding) -> None:
        """Say what the tool has to say about itself; operators have lines of their own."""
        if finding.rule != "op_check":
            self._say(f"[WARNING] {finding.message}")


class CompareWithCPU(_Front):
    """Judges each operator that runs in the block against a reference that the CPU works out from the same inputs.

    enabled: False does nothing at all. atol, rtol: judge by |y − r| ≤ atol + rtol·|r| instead of the calibrated bound.
    target_list (also target_op): operators to judge, such as `layer_norm` or `torch.ops.aten.addmm`; all by default.
    white_list: operators not to judge. dump_error_data: at the first step with a bug, write the worst call with a script
    that runs it, and raise StopTraining. verbose: add shapes, dtypes and devices to each line. enable_ranks: ranks that
    judge; all by default. should_log_to_file, output_dir: write `compare_result[_rank{r}].txt` there instead of to standard
    output. start_step, end_step: judge steps start_step ≤ n < end_step, where n is how often `step` was called. model: as
    for `open_module_tracker`. max_bytes: most memory on the host for the values of a step.
    """

    file = "compare_result"

    def __init__(
        self,
        enabled: bool = True,
        atol: float | None = None,
        rtol: float | None = None,
        target_list: Sequence[str] = (),
        white_list: Sequence[str] = (),
        dump_error_data: bool = False,
        verbose: bool = False,
        enable_ranks: Sequence[int] | None = None,
        should_log_to_file: bool = False,
        output_dir: str | Path = "",
        start_step: int | None = None,
        end_step: int | None = None,
        *,
        target_op: Sequence[str] = (),
        model: Any = None,
        max_bytes: int | str = "4 GiB",
    ) -> None:
        super().__init__(enabled, enable_ranks, should_log_to_file, output_dir, start_step, end_step, model)
        if (atol is None) != (rtol is None):
            atol, rtol = (CLASSIC_TOLERANCE if x is None else x for x in (atol, rtol))
        from trainprobe.engine.plan.subplans import read_section

        wanted = {
            **{"step": self._steps, "rank": self._ranks, "atol": atol, "rtol": rtol, "stop": dump_error_data},
            **{"ops": [*target_list, *target_op], "skip": [*white_list], "max_bytes": max_bytes},
        }
        self._settings = read_section("CompareWithCPU", OpCheckPlan, wanted)
        self._verbose = verbose

    def _make(self, level: Literal["L1", "mix"]) -> Probe:
        settings = self._settings.model_dump(exclude_unset=True)
        probe = Probe({"level": "off", "sinks": (), "console": False, "output": self._folder, "op_check": settings})
        probe.reporter.listeners.append(self._report)
        self._judging: OpCheckProgram = probe.program("op_check")
        self._judging.tell(self._say, self._folder)
        self._judging.judge_step.verdicts.verbose = self._verbose
        return probe

    def _tape(self, probe: Probe) -> Tape | None:
        return self._judging.tape


class NanInfTracker(_Front):
    """Reports the operators whose inputs, results or gradients hold NaN or infinities. Nothing is run on the CPU.

    The arguments are those of `CompareWithCPU`. verbose: write a line for each operator, also where all is finite.
    dump_error_data: raise StopTraining at the first step in which an operator made NaN or an infinity of finite inputs. The
    file is `nan_inf_report[_rank{r}].txt`.
    """

    file = "nan_inf_report"

    def __init__(
        self,
        enabled: bool = True,
        target_list: Sequence[str] = (),
        white_list: Sequence[str] = (),
        dump_error_data: bool = False,
        enable_ranks: Sequence[int] | None = None,
        should_log_to_file: bool = False,
        output_dir: str | Path = "",
        start_step: int | None = None,
        end_step: int | None = None,
        *,
        target_op: Sequence[str] = (),
        verbose: bool = False,
        model: Any = None,
    ) -> None:
        super().__init__(enabled, enable_ranks, should_log_to_file, output_dir, start_step, end_step, model)
        self._targets, self._skips = [*target_list, *target_op], [*white_list]
        self._stops, self._verbose = dump_error_data, verbose

    def _make(self, level: Literal["L1", "mix"]) -> Probe:
        from trainprobe.op_check.functions import api
        from trainprobe.op_check.training import OpNames

        plan = {
            **{"level": level, "step": self._steps, "rank": self._ranks, "statistics": ("nan", "inf"), "sinks": ()},
            **{"stacks": False, "console": False, "output": self._folder},
        }
        probe = _WritesNothing(plan)
        probe.reporter.listeners.append(self._report)
        chosen, skipped = OpNames(self._targets), OpNames(self._skips)

        def wanted(name: str) -> bool:
            names = (name, api(name))
            return (not self._targets or chosen.has(names)) and not skipped.has(names)

        probe.watchers.append(partial(self._look, wanted))
        return probe

    def _look(self, wanted: Callable[[str], bool], step_data: StepData) -> Sequence[Finding]:
        from trainprobe.op_check.recorded import module_of

        columns = numbers_of_rows(step_data)
        first = ""
        for call in step_data.calls:
            if call.kind != "op" or not wanted(call.name):
                continue
            given, gave = (_not_finite(tree, columns) for tree in ([call.args, call.kwargs], call.out))
            where = f"{module_of(call) or '-'} {call.name}.{call.call} ({call.phase})"
            text = f"step {step_data.step} {where}: inputs {given}; outputs {gave}"
            if given != FINITE or gave != FINITE:
                self._say(f"[WARNING] {text}")
            elif self._verbose:
                self._say(text)
            if not first and given == FINITE and gave != FINITE:
                first = text
        if first and self._stops:
            raise StopTraining(f"the first operator that made NaN or infinities of finite inputs: {first}")
        return ()


FINITE = "finite"


class _WritesNothing(Probe):
    def _make_writer(self, place: Place) -> Writer:
        from trainprobe.engine.storage.writer import Writer

        return Writer({}, place=place)


def _not_finite(tree: Any, columns: dict[str, list[Any]]) -> str:
    """Return how many NaN and infinities the tensors of a tree hold."""
    rows = [value.row for _, value in leaves(tree, "") if value.row >= 0]
    counts = {kind: sum(int(columns[kind][row] or 0) for row in rows) for kind in ("nan", "inf") if kind in columns}
    return ", ".join(f"{n} {word}" for kind, word in (("nan", "NaN"), ("inf", "Inf")) if (n := counts.get(kind, 0))) or FINITE


def _to_standard_output(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
