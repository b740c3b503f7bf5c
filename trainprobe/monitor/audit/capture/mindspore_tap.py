"""Gathers, for each audited step of a MindSpore training, the facts that the relations of the audit are about.

What is not called from Python in graph mode is learned otherwise: the number of updates from the optimizer's own count, the
data from the arguments of the cell that trains. Parameter groups are reported where gradients are seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import mindspore

from trainprobe.engine.capture import AUDIT, Tap
from trainprobe.engine.capture.mindspore.calls import KnownCalls, listed
from trainprobe.engine.capture.mindspore.cells import cells_of, is_graph_mode, parameters_in
from trainprobe.engine.capture.mindspore.states import CellStateTap, rates_of
from trainprobe.engine.core.containers import tensors_in
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import StepData, Value
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.capture.values import joined_of
from trainprobe.monitor.audit.facts import Facts
from trainprobe.monitor.audit.facts.calls import Evaluation, RandomFingerprints, TrainingCalls
from trainprobe.monitor.audit.facts.gradients import Backwards
from trainprobe.monitor.audit.facts.model import ModelFacts, ParameterFact, TrainingState
from trainprobe.monitor.audit.facts.updates import ParameterGroup, Progress, UpdateCounts, UsedGroups

if TYPE_CHECKING:
    from trainprobe.monitor.audit.program import AuditProgram

# optimizers whose moments follow the rule that torch's have too: m' = β₁m + (1 - β₁)g, v' = β₂v + (1 - β₂)g²
_RULES = {"Adam": "Adam", "AdamWeightDecay": "AdamW", "AdamW": "AdamW"}


class CellAuditTap(Tap):
    """Listens while a step is audited; `take` returns the facts once the step has crossed to the host.

    training_cell: the cell that trains, whose arguments are the data in graph mode.
    """

    part = AUDIT
    can_declare_loss = False
    awaits = False  # MindSpore tells nobody when a checkpoint is loaded

    def __init__(self, guard: Guard, states: CellStateTap) -> None:
        self.training_cell: Any = None
        self._states = states
        self._calls = KnownCalls(guard, self._called)
        self._models: list[Any] = []
        self._tape: Tape | None = None
        self._set_up: ModelFacts | None = None
        self._batches: list[list[Value]] = []
        self._evaluations: list[Evaluation] = []
        self._updates = 0
        self._stepped: set[int] = set()
        self._repeated = False
        self._early = False
        self._rates: tuple[float, ...] = ()
        self._groups: list[ParameterGroup] = []

    def attach(self, run: AuditProgram) -> None:
        """Ask `run` about the run; called before `open`."""
        self._run = run

    def follow(self, progress: Callable[[], Progress]) -> None:
        """Leave aside how far a trainer is: no relation asks for it under MindSpore."""

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Remember the model as it is set up."""
        self._models = listed(model)
        if self._set_up is None:
            self._set_up = self._facts(listed(optimizer))

    def begin(self, tape: Tape) -> None:
        """Listen to a step."""
        self._tape = tape
        self._states.more = STATS | CHECKSUM if self._run.wants("fingerprints") else STATS
        self._batches, self._repeated = [], False
        self._no_update_yet()
        self._calls.know(listed(self.training_cell) if is_graph_mode() else self._models)
        self._calls.begin()

    def end(self, again: bool = False) -> None:
        """Listen no more; what was seen stays until `take`."""
        self._tape = None
        self._states.more = 0
        self._calls.end(again)

    def close(self) -> None:
        """Leave nothing behind."""
        self.end()

    # ---- moments ---------------------------------------------------------------------------------------------------

    def _no_update_yet(self) -> None:
        self._updates, self._rates, self._groups, self._stepped, self._early = 0, (), [], set(), False

    def before_update(self, optimizers: Sequence[Any], early: bool = False) -> None:
        """These optimizers are about to step. early: if they do so inside a graph; should one be called, that call counts."""
        if self._tape is None:
            return
        if self._early:
            self._no_update_yet()
        self._early = early
        rates = {id(o): rates_of(o) for o in optimizers}  # now: after the update a schedule stands at the next step
        self._rates = (*self._rates, *dict.fromkeys(rate for several in rates.values() for rate in several))
        held = {id(p) for o in optimizers for p in o.parameters}
        self._repeated |= bool(held & self._stepped)
        self._stepped |= held
        if is_graph_mode():
            self._updates -= counted(optimizers)
        if not (early or is_graph_mode()):
            self._groups += [group for o in optimizers for group in _groups(o, rates[id(o)], self._states.names())]

    def after_update(self, optimizers: Sequence[Any]) -> None:
        """These optimizers have stepped, or, in graph mode, the step is over in which they did."""
        if self._tape is not None:
            self._updates += counted(optimizers) if is_graph_mode() else 1

    def evaluates(self) -> None:
        """Tell that the model is evaluated now."""
        live = tuple(name or ROOT for name, cell in cells_of(self._models) if cell.training)
        if not self._evaluations:
            self._evaluations.append(Evaluation(live, ()))

    def _called(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._tape is not None:
            self._batches.append([self._tape.value(t, STATS | CHECKSUM) for t in tensors_in((args, kwargs), _is_tensor)])

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def take(self, step_data: StepData) -> Facts:
        """Return the facts of the step that `step_data` holds."""
        assert self._set_up is not None
        batches, self._batches = self._batches, []
        return Facts(
            TrainingState(self._set_up, self._facts(self._states.optimizers()), self._run.ordinal),
            TrainingCalls(
                batches=tuple(joined_of(step_data, values) for values in batches),
                whole_numbers=any(_whole(value) for values in batches for value in values),
                tokens=tuple(next((prod(v.shape) for v in values if _whole(v)), 0) for values in batches),
                evaluations=self._take_evaluations(),
            ),
            Backwards(1),  # each step of a training differentiates, though the update may be left out
            UpdateCounts(self._updates, self._repeated),
            UsedGroups(tuple(self._groups), self._rates),
            RandomFingerprints(ended=_random_fingerprint()),
        )

    def late_evaluations(self) -> Facts | None:
        """Return facts of evaluations after the last audited step, or None when there were none."""
        found = self._take_evaluations()
        if not found or self._set_up is None:
            return None
        return Facts(TrainingState(self._set_up, self._set_up), TrainingCalls(evaluations=found))

    def _take_evaluations(self) -> tuple[Evaluation, ...]:
        taken, self._evaluations = tuple(self._evaluations), []
        return taken

    def _facts(self, optimizers: Sequence[Any]) -> ModelFacts:
        held = {id(p): p for optimizer in optimizers for p in optimizer.parameters}
        recorded = self._states.names()
        everything: dict[int, tuple[Any, dict[str, None]]] = {}
        modes: dict[str, bool] = {}
        for name, cell in cells_of(self._models):
            modes.setdefault(name, bool(cell.training))
            for short, p in parameters_in(cell).items():
                path = f"{name}.{short}" if name else short
                everything.setdefault(id(p), (p, {recorded.get(id(p), str(p.name)): None}))[1][path] = None
        owned = bool(optimizers)
        parameters = tuple(
            ParameterFact(
                tuple(names), key, key, bool(p.requires_grad), tuple(p.shape), str(p.dtype), key in held if owned else None
            )
            for key, (p, names) in everything.items()
        )  # a Parameter owns its data: the object stands for the storage
        strays = tuple((tuple(p.shape), str(p.dtype)) for key, p in held.items() if key not in everything)
        return ModelFacts(parameters, modes, strays, optimizer=", ".join(type(o).__name__ for o in optimizers))


def counted(optimizers: Sequence[Any]) -> int:
    """Return how often optimizers have stepped, by their own count."""
    counters: list[Any] = [getattr(optimizer, "global_step", None) for optimizer in optimizers]
    return sum(int(c.asnumpy().reshape(-1)[0]) for c in counters if isinstance(c, mindspore.Tensor))


def _groups(optimizer: Any, rates: Sequence[float], names: Mapping[int, str]) -> Iterator[ParameterGroup]:
    """Yield the parameters of an optimizer by their learning rate, with its plain numbers where its rule is known."""
    kind = _RULES.get(type(optimizer).__name__, "")
    options: dict[str, Any] = {}
    betas: list[Any] = [getattr(optimizer, name, None) for name in ("beta1", "beta2")]
    if kind and all(isinstance(beta, mindspore.Tensor) for beta in betas):
        options["betas"] = tuple(float(beta.asnumpy().reshape(-1)[0]) for beta in betas)
        options["weight_decay"] = 1.0 if getattr(optimizer, "exec_weight_decay", True) else 0.0
    if isinstance(optimizer, mindspore.nn.Rprop):
        options["etas"] = (float(optimizer.etaminus), float(optimizer.etaplus))
    scaled = getattr(optimizer, "need_scale", False)
    by_rate: dict[float, list[str]] = {}
    for i, p in enumerate(optimizer.parameters if rates else ()):
        by_rate.setdefault(rates[i if len(rates) > 1 else 0], []).append(names.get(id(p), str(p.name)))
    for rate, of in by_rate.items():
        yield ParameterGroup("" if scaled else kind, frozenset(of), {"lr": rate, **options})


def _is_tensor(x: Any) -> bool:
    return isinstance(x, mindspore.Tensor)


def _whole(value: Value) -> bool:
    return "int" in value.dtype.lower()


def _random_fingerprint() -> int:
    state = mindspore.get_rng_state() if hasattr(mindspore, "get_rng_state") else None
    return 0 if state is None else zlib.crc32(state.asnumpy().tobytes())
