"""The `op_check` section of a plan: operators are judged while the training runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trainprobe.engine.plan.field_types import NamePatterns, Numbers, one_or_many, parse_bytes
from trainprobe.engine.plan.subplans import read_section
from trainprobe.errors import PlanError

Kind = Literal["last-bit", "noise", "precision", "swap", "nothing"]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(one_or_many)]


class OpCheckPlan(BaseModel):
    """All settings of judging operators inside the training."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    step: Numbers = (0,)
    """Which steps are judged, written as the plan's own `step`; the others cost nothing."""
    rank: Numbers = ("all",)
    """Which global ranks judge; written as `step` is."""
    modules: NamePatterns = ("**",)
    """Patterns of the modules whose operators are judged; operators outside of modules belong to `**` alone."""
    ops: Texts = ()
    """Operators that are judged, such as `layer_norm`, `Functional.*` or `torch.ops.aten.addmm`; left out: all."""
    skip: Texts = ()
    """Operators that are not judged, written as `ops` is."""
    atol: Annotated[float, Field(ge=0)] | None = None
    """Absolute tolerance that replaces the calibrated bound, together with `rtol`."""
    rtol: Annotated[float, Field(ge=0)] | None = None
    """Relative tolerance that replaces the calibrated bound, together with `atol`."""
    stop: Annotated[bool, Field(strict=True)] = False
    """At a bug write the call as a script that replays it (folder `op_check` of the output) and stop the training."""
    condition: Kind | None = None
    """Run each judged call again with perturbed inputs, on the device that it ran on, after the step: `last-bit`, `noise`,
    `precision`, `swap`, or `nothing`, which finds operators that are not deterministic. What they make of it is written to
    `op_check/condition_step{N}_rank{R}.json`, which `dump-compare --floor` reads."""
    max_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)] = 4 << 30
    """Most memory on the host that the values of a judged step may take, as a number or as "4 GiB"; calls whose values do not
    fit are counted as not checked."""
    server: Annotated[str, Field(min_length=1)] | None = None
    """HOST:PORT of a `trainprobe op-check serve`, which judges instead of this machine (docs/op_check_online.md)."""
    folder: Annotated[str, Field(min_length=1)] | None = None
    """A folder that both machines share, in place of `server`."""
    tls: Annotated[str, Field(min_length=1)] | None = None
    """Folder with ca.pem, cert.pem and key.pem (perhaps crl.pem) of this side; TLS 1.3, each side shows its certificate."""
    insecure: Annotated[bool, Field(strict=True)] = False
    """Send what the model computes to a `server` on another machine without TLS, readable for everybody on the way."""
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")] | None = None
    """Name of the run's folder on the server; left out: the time and a random number, another one for each rank."""
    patience: Annotated[float, Field(gt=0)] = 30.0
    """Seconds of silence after which the server is asked whether it is there; after three times that the link is broken."""
    wait: Annotated[float, Field(ge=0)] = 60.0
    """Most seconds that the end of the run waits for verdicts of the server."""


def validate(settings: Mapping[str, Any] | bool | None = True) -> OpCheckPlan:
    """Return the settings of a section. Raises PlanError, which names each key, its value and what was probably meant."""
    plan = read_section("op_check", OpCheckPlan, settings)
    if (plan.atol is None) != (plan.rtol is None):
        raise PlanError("op_check: atol and rtol replace the bound together: give both, 0 for the one that allows nothing")
    _check_link(plan)
    return plan


def _check_link(plan: OpCheckPlan) -> None:
    if plan.server is not None and plan.folder is not None:
        raise PlanError("op_check: server and folder are two roads to one machine: give one of them")
    if plan.condition is not None and (plan.server is not None or plan.folder is not None):
        raise PlanError("op_check: condition runs the calls of a step here: leave server and folder out, or condition")
    if plan.server is None and (plan.tls is not None or plan.insecure):
        raise PlanError("op_check: tls and insecure say how `server` is reached, and there is no server: give its HOST:PORT")
    if plan.server is None:
        return
    from trainprobe.op_check.online.addresses import is_loopback, split_address

    try:
        host, _ = split_address(plan.server)
    except ValueError as error:
        raise PlanError(f"op_check: server: {error}") from None
    if plan.tls is None and not plan.insecure and not is_loopback(host):
        raise PlanError(
            f"op_check: {plan.server} is another machine and there is no tls: give the folder of this side's keys "
            "(`trainprobe op-check certs` makes some), or `insecure: true` to send all values in plain text"
        )
