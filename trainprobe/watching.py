"""`watch(model, optimizer, plan=...)`: a plain training loop with a probe around it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Generator
from contextlib import _GeneratorContextManager  # pyright: ignore[reportPrivateUsage]
from typing import TYPE_CHECKING, Any, NoReturn

from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.log_lines import say
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Place
from trainprobe.engine.core.topology import check_place
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.unobserved import lacks_descriptors, unobserved
from trainprobe.errors import ProbeError
from trainprobe.run.probe import PlanSource as PlanSource
from trainprobe.run.probe import Probe as Probe

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trainprobe.engine.plan.fields import PlanFields
    from trainprobe.engine.plan.model import Plan
    from trainprobe.integrations.torch_pipeline import Pipeline


def probe_class(model: Any) -> type[Probe]:
    """Return the class of the probe for a model: that of MindSpore for its cells, else that of PyTorch."""
    cell = getattr(getattr(sys.modules.get("mindspore"), "nn", None), "Cell", None)
    if cell is None or not any(isinstance(chunk, cell) for chunk in chunks_of(model)):
        return Probe
    from trainprobe.integrations.mindspore_probe import MindSporeProbe

    return MindSporeProbe


def is_split_by_megatron(model: Any) -> bool:
    """Return whether a model is one of megatron.core, whose parallel state says how it is split."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return False
    parameters = (p for chunk in chunks_of(model) if hasattr(chunk, "parameters") for p in chunk.parameters())
    return any(hasattr(p, "tensor_model_parallel") for p in parameters)


def pipeline_of(model: Any) -> Pipeline | None:
    """Return the stages of torch.distributed.pipelining that run a model here, None where there are none."""
    if "torch.distributed.pipelining" not in sys.modules:
        return None
    from trainprobe.integrations.torch_pipeline import Pipeline

    found = Pipeline(model)
    return found if found.stages else None


def _about(model: Any, place: Place | None, pipeline: Pipeline | None) -> dict[str, Any]:
    """Return what a probe is told of where this rank stands, besides its plan."""
    if is_split_by_megatron(model):
        from trainprobe.integrations.megatron_layout import told_by_megatron

        return told_by_megatron(model, place)
    return {"place": pipeline.place() if pipeline is not None and place is None else place}


def _placed(plan: Plan, here: Place, told: Place | None, optimizer: Any) -> tuple[Plan, int]:
    """Return the plan with the folder that is written to, and how many steps an earlier run there has that this one goes on."""
    from trainprobe.integrations.output_folder import placed, steps_to_go_on_from

    if told is not None and told.world_size != here.world_size:  # ranks that this process alone plays
        return plan, 0
    given: Any = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    updates = steps_to_go_on_from(plan, here, given)
    return placed(plan, here, resumed=updates > 0), updates


NOT_ENTERED = (
    "nothing was watched: watch(...) begins at `with`. Write `with trainprobe.watch(...) as probe:` around the loop, and in it "
    "`with probe.step():` around each step."
)


class Watching(_GeneratorContextManager[Probe]):
    """The block that `watch` returns; one that is never entered says so, once it is collected or the process ends."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._unused = weakref.finalize(self, say, NOT_ENTERED, severity="warning")

    def __enter__(self) -> Probe:
        self._unused.detach()
        return super().__enter__()

    def _recreate_cm(self) -> Watching:  # a function that it decorates has a block of its own at each call
        self._unused.detach()
        return super()._recreate_cm()  # pyright: ignore

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(Probe, name):
            self._unused.detach()
        raise AttributeError(f"watch(...) has no {name}: {NOT_ENTERED}")


def watch(
    model: Any,
    optimizer: Any = None,
    plan: PlanSource = None,
    *,
    place: Place | None = None,
    **overrides: Unpack[PlanFields],
) -> Watching:
    """Watch a plain training loop of PyTorch, or of MindSpore where `model` is a cell.

        with trainprobe.watch(model, optimizer, plan="plan.yaml") as probe:
            for batch in data:
                with probe.step():
                    loss = model(batch); probe.note("loss", loss)
                    loss.backward(); optimizer.step(); optimizer.zero_grad()

    A folder that holds a run is not written to again: a new run gets one beside it. Where the optimizer's counters show that
    the training goes on with the newest run there, it is written behind it, and steps are numbered on.

    plan: path, dict, Plan or None; `overrides` are plan fields. With neither, each step is judged and nothing is dumped;
    `record="L0"` asks for dumps. Everything is written when the block ends. One line is printed at the start, one at the end,
    and warnings and errors when they happen, unless the plan says `console: false`.

    place: where this rank stands on the parallel axes, `trainprobe.Place(rank, world_size, {"dp": (0, 2), "tp": (1, 4)})`;
    without it, what Megatron's parallel state, the meshes of DTensors or torch.distributed say. Raises UsageError for a place
    that cannot be.
    """
    return Watching(_watch, (model, optimizer, plan, place), overrides)


def _unchecked(probe: Probe) -> Generator[Probe]:
    """Watch a loop of a framework whose calls in the loop are not looked at."""
    from trainprobe.integrations.loop_words import NO_STEP

    yield probe
    if not probe.begun:
        probe.at_end(NO_STEP)


def _watch(
    model: Any, optimizer: Any, plan: PlanSource, place: Place | None, **overrides: Unpack[PlanFields]
) -> Generator[Probe]:
    if place is not None:
        check_place(place)
    from trainprobe.integrations import announce

    try:
        pipeline: Pipeline | None = attempt(pipeline_of, model, otherwise=lambda _: None)
        kind = probe_class(model)
        plan, updates = _placed(load_plan(plan, kind.backend.name, **overrides), kind.backend.place(), place, optimizer)
        probe = kind(plan, **_about(model, place, pipeline))
        probe.step_number += updates
        checking: Any = None
        if probe.framework == "pytorch":
            from trainprobe.integrations import loop_checks as checking
    except (OSError, ProbeError) as fault:
        if not lacks_descriptors(fault):
            raise
        instead: Any = unobserved()
        yield instead
        return
    with probe:
        probe.open(model, optimizer)
        probe.watches_own_loop()
        probe.guard.run(announce, probe)
        if checking is None:
            yield from _unchecked(probe)
            return
        for finding in probe.guard.run(lambda *given: list(checking.wrong_optimizers(*given)), model, optimizer) or ():
            probe.report_once(finding)
        if pipeline is not None:
            pipeline.rest_while_learning(probe)
        del optimizer  # one that the training replaces is not kept
        checks = checking.LoopChecks(model, probe.guard)
        try:
            yield probe
            sentence = probe.guard.run(checks.sentence, probe.begun, probe.judges)
            if sentence and probe.plan.level != "debug":
                probe.at_end(sentence)
        finally:
            checks.close()
            if pipeline is not None:
                pipeline.close()
