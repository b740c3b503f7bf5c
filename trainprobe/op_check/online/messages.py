"""What frames say: who calls, what may be sent, one operator call with its tensors, and the verdict on it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import safetensors
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors.torch import load, save

from trainprobe.engine.core.records import Call, Opaque, Place, StepData, Value
from trainprobe.engine.stats.partials import PARTIALS
from trainprobe.engine.storage.dumps.tensor_files import SAFETENSORS_DTYPES, SavedTensor, plain_dtype
from trainprobe.op_check.check import Checked
from trainprobe.op_check.judge import Judgement
from trainprobe.op_check.online.frames import FrameError, Kind, WireFrame
from trainprobe.op_check.recorded import RecordedRank, Unit
from trainprobe.op_check.training import HeldValues

_DEEPEST = 24
_ROUND_IT = 1 << 16  # counted for a call besides its tensors
_NAME = re.compile(r"[A-Za-z_][\w.:/\[\]<>-]{0,299}", re.ASCII)
_JUDGEMENTS = TypeAdapter(list[Judgement])
_NUMBERS = {f.name for f in dataclasses.fields(Judgement) if "float" in str(f.type)}
Message = TypeVar("Message", bound="_Message")


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hello(_Message):
    """The first frame of a training. run: names its folder of reports. atol, rtol: replace the calibrated bound."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
    rank: Annotated[int, Field(ge=0, lt=1 << 31)]
    world_size: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    release: Annotated[str, Field(max_length=50)] = ""
    atol: Annotated[float, Field(ge=0)] | None = None
    rtol: Annotated[float, Field(ge=0)] | None = None


class Welcome(_Message):
    """The answer. window: bytes of calls that may be on their way or waiting for their verdict. here: the server's device."""

    window: Annotated[int, Field(ge=1)]
    here: Annotated[str, Field(max_length=50)] = ""


class CallVerdict(_Message):
    """The judgements of one call. equal_to: the number of an earlier call with the same bits, which has them.

    same_inputs: an earlier entry that had these inputs and gave another result. here: what the same inputs gave on the
    server's own device, judged in the same way. nearer: which of the two is nearer the truth.
    """

    number: int
    judgements: list[dict[str, Any]] = []
    source: str = ""
    note: str = ""
    equal_to: int | None = None
    same_inputs: str = ""
    here: list[dict[str, Any]] | None = None
    nearer: str = ""

    def checked(self, direction: Any) -> Checked:
        """Return the judgements as way 2 has them. Raises FrameError."""
        return Checked(direction, _judgements(self.judgements), self.source, self.note)


class Sent(_Message):
    """What a training did in all, in its BYE."""

    sent: Annotated[int, Field(ge=0)] = 0
    left_out: Annotated[int, Field(ge=0)] = 0
    unanswered: Annotated[int, Field(ge=0)] = 0


@dataclass(slots=True)
class SentCall:
    """One operator call as it arrived. recorded: its step, with this call alone."""

    number: int
    step: int
    recorded: RecordedRank
    unit: Unit
    nbytes: int


def read(frame: WireFrame, model: type[Message]) -> Message:
    """Return the header of a frame as a message. Raises FrameError, which names each key and its value."""
    try:
        return model.model_validate(frame.header)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise FrameError(f"a {frame.kind.name} frame: {where}: {problem['msg']}") from None


def write(kind: Kind, message: _Message) -> WireFrame:
    """Return a message as a frame."""
    return WireFrame(kind, message.model_dump(exclude_defaults=True))


def judgements_as_json(judgements: Sequence[Judgement]) -> list[dict[str, Any]]:
    """Return judgements as JSON has them: infinities and NaN are text."""
    found: list[dict[str, Any]] = []
    for judgement in judgements:
        fields = dataclasses.asdict(judgement)
        found.append(
            {k: str(v) if k in _NUMBERS and isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        )
    return found


def _judgements(given: Sequence[Mapping[str, Any]]) -> list[Judgement]:
    try:
        return _JUDGEMENTS.validate_python([*given])
    except ValidationError as error:
        raise FrameError(f"a VERDICT frame: {error.errors(include_url=False)[0]['msg']}") from None


# ---- one operator call ---------------------------------------------------------------------------------------------


class CannotSend(Exception):  # noqa: N818  (named for what it says)
    """A call that cannot be written as a frame; the text says why."""


def call_frame(number: int, step: int, unit: Unit, values: HeldValues) -> WireFrame:
    """Return a call as a frame. Raises CannotSend where a value is not held or has no place in a safetensors file."""
    places: dict[int, int] = {}
    listed: list[dict[str, Any]] = []
    tensors: dict[str, Any] = {}

    def place(value: Value) -> dict[str, Any]:
        if id(value) not in places:
            places[id(value)] = len(listed)
            listed.append(_value_as_json(value))
            if value.tensor is not None and value.tensor not in tensors:
                tensors[value.tensor] = _tensor(values, value)
        return {"value": places[id(value)]}

    call = unit.call
    if not all(map(_NAME.fullmatch, (unit.entry, call.name))):
        raise CannotSend(f"its name {unit.entry[:60]!r} is not sent")
    header = {
        **{"number": number, "step": step, "entry": unit.entry, "module": unit.module, "direction": unit.direction},
        **{"of_inputs": unit.of_inputs, "name": call.name, "call": call.call, "phase": call.phase},
        **{
            key: _as_json(tree, place)
            for key, tree in (
                *(("args", call.args), ("kwargs", call.kwargs), ("out", call.out)),
                *(("gradients", list(unit.gradients)), ("results", list(unit.results))),
            )
        },
        "values": listed,
    }
    names = {key: str(i) for i, key in enumerate(tensors)}
    for value in listed:
        value["tensor"] = names.get(value["tensor"]) if value["tensor"] is not None else None
    try:
        return WireFrame(Kind.CALL, header, save({names[key]: t for key, t in tensors.items()}))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CannotSend(f"its tensors cannot be written: {error}") from None


def _tensor(values: HeldValues, value: Value) -> Any:
    saved = values.saved(str(value.tensor))
    if saved is None:
        raise CannotSend("its values were not held: max_bytes is used up, by this step or by steps that wait for the link")
    dtype = getattr(torch, plain_dtype(saved.dtype), None)
    if plain_dtype(saved.dtype) not in SAFETENSORS_DTYPES or not isinstance(dtype, torch.dtype):
        raise CannotSend(f"values of dtype {saved.dtype} are not sent")
    whole = (
        torch.from_numpy(np.array(np.frombuffer(saved.data, np.uint8))) if saved.nbytes else torch.empty(0, dtype=torch.uint8)
    )
    return whole.view(dtype).reshape(saved.shape)


def _value_as_json(value: Value) -> dict[str, Any]:
    if min(value.shape, default=0) < 0:
        raise CannotSend("ragged tensors are not sent")
    return {
        **{"dtype": value.dtype, "shape": [*value.shape], "device": value.device, "requires_grad": value.requires_grad},
        **{"note": value.note, "tensor": value.tensor, "sharded": bool(value.extra and "placements" in value.extra)},
    }


def _as_json(tree: Any, place: Any) -> Any:
    """Return a tree of a call as JSON: lists and plain leaves as they are, all else as an object with a key that names it."""
    if isinstance(tree, Value):
        return place(tree)
    if isinstance(tree, Opaque):
        return {"opaque": [tree.type, _as_json(tree.value, place), _as_json(tree.extra, place)]}
    if isinstance(tree, (list, tuple)):
        return [_as_json(item, place) for item in tree]
    if isinstance(tree, Mapping):
        return {"dict": [[str(key), _as_json(item, place)] for key, item in tree.items()]}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"float": str(tree)}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise CannotSend(f"an argument of type {type(tree).__name__} is not sent")


class _SentValue(_Message):
    dtype: Annotated[str, Field(max_length=100)]
    shape: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64)]
    device: Annotated[str, Field(max_length=100)]
    requires_grad: bool | None
    note: Annotated[str, Field(max_length=2000)] | None
    tensor: str | None
    sharded: bool


class _CallHeader(_Message):
    number: Annotated[int, Field(ge=0, lt=1 << 62)]
    step: int
    entry: str
    module: Annotated[str, Field(max_length=2000)]
    direction: Annotated[str, Field(pattern="^(forward|backward)$")]
    of_inputs: bool
    name: str
    call: int
    phase: str
    args: Any
    kwargs: Any
    out: Any
    gradients: list[Any]
    results: list[Any]
    values: list[_SentValue]


def read_call(frame: WireFrame, rank: int) -> SentCall:
    """Return the call of a CALL frame. Raises FrameError for anything that is not as `call_frame` writes it."""
    header = read(frame, _CallHeader)
    for text in (header.entry, header.name):
        if _NAME.fullmatch(text) is None:
            raise FrameError(f"a CALL frame: {text[:60]!r} is no name of an operator call")
    held = _held(frame)
    values = [_read_value(value, held) for value in header.values]
    phase: Any = header.phase
    if phase not in ("forward", "optimizer"):
        raise FrameError(f"a CALL frame: phase {phase[:30]!r}")
    call = Call("op", header.name, header.call, phase)
    call.args, call.kwargs, call.out = (_from_json(tree, values) for tree in (header.args, header.kwargs, header.out))
    if not isinstance(call.kwargs, dict | None) or not all(key.isidentifier() for key in call.kwargs or ()):
        raise FrameError("a CALL frame: kwargs have names of Python")
    gradients, results = ([_from_json(tree, values) for tree in trees] for trees in (header.gradients, header.results))
    unit = Unit(header.entry, header.module, call, header.direction, gradients, results, header.of_inputs)
    place = Place(rank)
    step = StepData(header.step, place, "pytorch", "mix", "tensor", [call], values, np.zeros((0, len(PARTIALS))))
    return SentCall(header.number, header.step, RecordedRank(step, held), unit, nbytes_of(frame))


def nbytes_of(frame: WireFrame) -> int:
    """Return the bytes of a frame's payload as both sides count them against the window."""
    return len(frame.payload) + _ROUND_IT


def _held(frame: WireFrame) -> HeldValues:
    try:
        tensors = load(frame.payload) if frame.payload else {}
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise FrameError(f"the payload of a CALL frame is no safetensors file: {error}") from None
    held = HeldValues(len(frame.payload))
    for name, tensor in tensors.items():
        held.tensor(0, SavedTensor.of(name, tensor))
    return held


def _read_value(sent: _SentValue, held: HeldValues) -> Value:
    if sent.tensor is not None:
        saved = held.saved(sent.tensor)
        if saved is None or saved.dtype != sent.dtype or saved.shape != sent.shape:
            raise FrameError(f"a CALL frame: its payload holds no {sent.dtype} {[*sent.shape]} under {sent.tensor[:30]!r}")
    extra = {"placements": True} if sent.sharded else None
    return Value(
        -1,
        sent.dtype,
        sent.shape,
        device=sent.device,
        requires_grad=sent.requires_grad,
        note=sent.note,
        tensor=sent.tensor,
        extra=extra,
    )


def _from_json(tree: Any, values: Sequence[Value], depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise FrameError(f"a CALL frame: arguments that are nested more than {_DEEPEST} deep")
    if isinstance(tree, list):
        return [_from_json(item, values, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise FrameError("a CALL frame: an argument has one key that says what it is")
    ((kind, given),) = tree.items()
    if kind == "value" and isinstance(given, int) and 0 <= given < len(values):
        return values[given]
    if kind == "float" and given in ("nan", "inf", "-inf"):
        return float(given)
    if kind == "dict" and isinstance(given, list) and all(isinstance(p, list) and len(p) == 2 for p in given):
        return {str(key): _from_json(item, values, depth + 1) for key, item in given}
    if kind == "opaque" and isinstance(given, list) and len(given) == 3 and isinstance(given[0], str):
        return Opaque(given[0], *(_from_json(item, values, depth + 1) for item in given[1:]))
    raise FrameError(f"a CALL frame: an argument is written as {kind[:30]!r}")
