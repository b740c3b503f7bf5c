"""One call that arrived, judged on the server: against the reference, and for three ways on the server's own device too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.errors import OutputError
from trainprobe.op_check.cases import Case, NotChecked, flat, mapped
from trainprobe.op_check.check import Checked, check
from trainprobe.op_check.dump import DumpChecked, RankCheck, Row
from trainprobe.op_check.execution import run_here
from trainprobe.op_check.functions import function
from trainprobe.op_check.judge import Judgement, Tolerance
from trainprobe.op_check.online.messages import CallVerdict, SentCall, judgements_as_json
from trainprobe.op_check.online.reports import Report
from trainprobe.op_check.pairs import nearer

_WIDEST = 8  # bytes of an element of a reference
_NAMES = "the training's device", "the server's"


class CallJudge:
    """Judges the calls of one rank as they come, equal ones of a step once, and writes its report.

    device: of the server, to run each call on as well; empty for two ways. most: bytes that a result may take.
    """

    def __init__(self, report: Report, rank: int, tolerance: Tolerance | None, device: str, most: int) -> None:
        self.report = report
        self._rank = rank
        self._tolerance = tolerance
        self._device = device
        self._most = most
        self._step: int | None = None
        self._check = RankCheck(DumpChecked(), (0, rank), tolerance)
        self._numbers: dict[int, int] = {}  # id of a row of this step → the number of its call

    def __call__(self, call: SentCall) -> CallVerdict:
        """Judge a call. What the reference cannot do is a verdict too: not checked. Raises OutputError."""
        found: CallVerdict | Exception = attempt(self._judged, call, otherwise=lambda fault: fault)
        if isinstance(found, OutputError):
            raise found
        return (
            found if isinstance(found, CallVerdict) else self._not_checked(call, f"the reference failed: {fault_text(found)}")
        )

    def _not_checked(self, call: SentCall, why: str) -> CallVerdict:
        judgements, unit = [Judgement("not checked", why)], call.unit
        checked = Checked("backward" if unit.direction == "backward" else "forward", judgements)
        row = Row(call.step, self._rank, unit.entry, unit.call.name, unit.module, checked)
        self.report.add(row, call.recorded, None, "")
        return CallVerdict(number=call.number, judgements=judgements_as_json(judgements))

    def _judged(self, call: SentCall) -> CallVerdict:
        if call.step != self._step:
            self._step = call.step
            self._check = RankCheck(DumpChecked(), (call.step, self._rank), self._tolerance)
            self._numbers = {}
        too_large = _too_large(call, self._most)
        if too_large:
            return self._not_checked(call, too_large)
        row, new = self._check.add(call.recorded, call.unit)
        if not new:
            return CallVerdict(number=call.number, equal_to=self._numbers[id(row)])
        self._numbers[id(row)] = call.number
        here, text = self._here(call, row)
        self.report.add(row, call.recorded, here, text)
        return CallVerdict(
            number=call.number,
            judgements=judgements_as_json(row.checked.judgements),
            source=row.checked.source,
            note=row.checked.note,
            same_inputs=row.same_inputs,
            here=None if here is None else judgements_as_json(here.checked.judgements),
            nearer=text,
        )

    def _here(self, call: SentCall, row: Row) -> tuple[Row | None, str]:
        """Return the same call on this machine's device, judged, and which of the two is nearer the truth."""
        if not self._device:
            return None, ""
        backward = call.unit.direction == "backward"
        try:
            checked = check(run_on(self._device, call.recorded.case(call.unit), backward), backward, self._tolerance)
        except NotChecked as why:
            checked = Checked(row.checked.direction, [Judgement("not checked", str(why))])
        checked.expectation = None
        text = ""
        if "not checked" not in {j.outcome for c in (row.checked, checked) for j in c.judgements}:
            text = nearer(row.checked, checked, _NAMES)
        return replace(row, checked=checked), text


def run_on(device: str, case: Case, backward: bool) -> Case:
    """Return the call with what a device of this machine makes of its inputs, on the host. Raises NotChecked."""
    if case.of_inputs:
        raise NotChecked("the gradients of a module's weights are judged two ways alone")

    def there(t: torch.Tensor) -> torch.Tensor:
        return t.to(device)

    def back(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [None if t is None else t.cpu() for t in tensors]

    args, kwargs = mapped((case.args, dict(case.kwargs)), there)
    gradients = None if case.gradients is None else [None if g is None else there(g) for g in case.gradients]
    ran = run_here(replace(case, args=args, kwargs=kwargs, gradients=gradients), backward)
    return replace(case, outputs=back(ran.outputs), results=back(ran.results))


def _too_large(call: SentCall, most: int) -> str:
    """Return why a call is not run: its whole numbers ask for a result far larger than all that was sent."""
    try:
        case = call.recorded.case(call.unit)
    except NotChecked:
        return ""
    sent = sum(t.numel() for t in flat([case.args, dict(case.kwargs), [*case.outputs], [*(case.gradients or ())]]))
    sizes: list[int] = []
    mapped((case.args, dict(case.kwargs)), lambda t: t, lambda leaf: sizes.append(leaf) if type(leaf) is int else None)
    if math.prod(max(1, abs(size)) for size in sizes) * _WIDEST <= max(most, 64 * sent):
        return ""
    nbytes = attempt(_result_bytes, case, otherwise=lambda _: 0)
    return f"its result would take {nbytes} bytes, and the server holds {most} (--max-bytes)" if nbytes > most else ""


def _result_bytes(case: Case) -> int:
    """Return how large the results of a call are in float64, which torch tells without computing them."""
    call = function(case.name)
    args, kwargs = mapped((tuple(case.args), dict(case.kwargs)), lambda t: torch.empty_like(t, device="meta"))
    if call is None:
        return 0
    with torch.device("meta"), torch.no_grad():
        return sum(
            t.numel() * _WIDEST for t in flat(call(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})}))
        )
