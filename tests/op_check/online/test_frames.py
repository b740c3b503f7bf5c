"""The frames of the online check: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import orjson
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import trainprobe
from trainprobe.engine.core.records import Opaque
from trainprobe.op_check.check import check
from trainprobe.op_check.judge import Judgement
from trainprobe.op_check.online.frames import Decoder, FrameError, Kind, WireFrame, encode
from trainprobe.op_check.online.judging import CallJudge
from trainprobe.op_check.online.messages import (
    CallVerdict,
    CannotSend,
    Welcome,
    call_frame,
    judgements_as_json,
    read,
    read_call,
)
from trainprobe.op_check.online.reports import Report
from trainprobe.op_check.recorded import RecordedRank
from trainprobe.op_check.training import HeldValues

MOST = 1 << 20


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, RecordedRank, WireFrame]]:
    """The calls of a small step, each with what the training has of it and as a frame."""
    from trainprobe import Probe

    kept: list[tuple[Any, RecordedRank, WireFrame]] = []
    probe = Probe(level="off", op_check=True, console=False, output=tmp_path_factory.mktemp("frames"))
    judging = probe.program("op_check")

    class Keeps:
        def __call__(self, step_data: Any) -> list[Any]:
            values = judging.held.hand_over()
            recorded = RecordedRank(step_data, values)
            for unit in recorded.units():
                kept.append((unit, recorded, call_frame(len(kept), step_data.step, unit, values)))
            return []

        def summary(self) -> str:
            return ""

    judging.judge_step = Keeps()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.LayerNorm(6)).to(torch.bfloat16)
    with probe:
        probe.open(model)
        probe.begin_step(0)
        y = model(torch.randn(3, 4, dtype=torch.bfloat16)).masked_fill(torch.eye(3, 6) > 0, float("-inf"))
        F.softmax(y[:, 1:], dim=-1, dtype=torch.float32).amax().backward()
        probe.end_step()
    return kept


def test_a_call_is_the_same_on_the_other_side(sent: list[tuple[Any, RecordedRank, WireFrame]]) -> None:
    assert len(sent) > 10
    for unit, recorded, frame in sent:
        (arrived,) = Decoder(MOST).feed(encode(frame) + frame.payload)
        call = read_call(arrived, 0)
        if not unit.call.params:  # written arguments and states of generators do not cross
            assert call.recorded.key(call.unit) == recorded.key(unit)
        ours, theirs = recorded.case(unit), call.recorded.case(call.unit)
        assert (ours.name, ours.requires_grad, ours.of_inputs) == (theirs.name, theirs.requires_grad, theirs.of_inputs)
        backward = unit.direction == "backward"
        if ours.name in ("Functional.softmax", "Tensor.masked_fill"):
            assert check(ours, backward).judgements == check(theirs, backward).judgements


def test_frames_come_in_any_pieces(sent: list[tuple[Any, RecordedRank, WireFrame]]) -> None:
    data = b"".join(encode(frame) + frame.payload for *_, frame in sent[:3])
    decoder = Decoder(MOST)
    found = [frame for i in range(0, len(data), 7) for frame in decoder.feed(data[i : i + 7])]
    assert [frame.payload for frame in found] == [frame.payload for *_, frame in sent[:3]]
    assert decoder.between_frames


def test_a_thousand_mutated_frames_are_refused_or_judged(
    sent: list[tuple[Any, RecordedRank, WireFrame]], tmp_path: Any
) -> None:
    """Half of them have right checksums, so that what stands behind the checksums is reached."""
    draw = random.Random(0)
    judge = CallJudge(Report(tmp_path, "run", 0), 0, None, "", MOST)
    outcomes = {"refused": 0, "read": 0}
    tracemalloc.start()
    for turn in range(1000):
        frame = draw.choice(sent)[2]
        payload = bytearray(frame.payload)
        if turn % 2:
            header = orjson.loads(orjson.dumps(frame.header))
            change_a_leaf(draw, header)
            if turn % 8 == 1 and payload:
                mutate(draw, payload)
            head = bytearray(encode(WireFrame(frame.kind, header, bytes(payload))))
        else:
            head = bytearray(encode(frame))
            mutate(draw, payload if turn % 4 == 0 and payload else head)
        try:
            for arrived in Decoder(MOST).feed(bytes(head + payload)):
                call = read_call(arrived, 0)
                outcomes["read"] += 1
                if turn % 10 == 1:
                    verdict = judge(call)
                    assert verdict.judgements or verdict.equal_to is not None
        except FrameError:
            outcomes["refused"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcomes["refused"] > 600
    assert outcomes["read"] > 50
    assert peak < 32 << 20


def change_a_leaf(draw: random.Random, tree: Any) -> None:
    """Put something else in place of one leaf, or remove it."""
    key = draw.choice([*tree] if isinstance(tree, dict) else range(len(tree)))
    if isinstance(tree[key], (dict, list)) and tree[key] and draw.random() < 0.9:
        change_a_leaf(draw, tree[key])
    elif draw.random() < 0.2:
        del tree[key]
    else:
        tree[key] = draw.choice(
            [-1, 0, 1, 3, 1 << 40, 0.5, None, True, "x", "torch.float32", [], {"value": 0}, {"float": "nan"}]
        )


def mutate(draw: random.Random, data: bytearray) -> None:
    """Change bits, cut, repeat or exchange pieces, or put other text in place of numbers."""
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(data))
        kind = draw.randrange(6)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and len(data) > 8:
            del data[at : at + draw.randrange(1, 8)]
        elif kind == 2:
            data[at:at] = data[at : at + draw.randrange(1, 64)]
        elif kind == 3:
            data[at : at + 1] = draw.choice([b"9999999999", b"-1", b"null", b"[", b'{"value":', b'"', b"\xff"])
        elif kind == 4:
            data[at] = draw.randrange(256)
        else:
            other = draw.randrange(len(data))
            data[at], data[other] = data[other], data[at]


def test_lengths_are_refused_before_anything_is_held() -> None:
    def announced(header: int, payload: int, kind: int = Kind.CALL, version: int = 1) -> bytes:
        return struct.pack(">4sBBHIQII", b"TPOC", version, kind, 0, header, payload, 0, 0)

    for data, why in (
        (announced(10, 1 << 62), "announces a payload of 4611686018427387904 bytes, at most 1048576 are read"),
        (announced(1 << 30, 0), "a header of 1073741824 bytes is announced, at most 1048576"),
        (announced(10, 1, Kind.HELLO), "a HELLO frame announces a payload of 1 bytes, at most 0"),
        (announced(10, 0, kind=77), "there is no frame of kind 77"),
        (announced(10, 0, version=2), "writes version 2 of this protocol, here it is 1"),
        (b"GET / HTTP/1.1\r\n", "no frame of this protocol begins with b'GET / HT'"),
        (b"\x80\x04", r"begins with b'\\x80\\x04'"),
    ):
        with pytest.raises(FrameError, match=why):
            list(Decoder(MOST).feed(data))
    held = Decoder(MOST)
    assert list(held.feed(announced(10, MOST))) == []
    assert not held.between_frames


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"args": [{"value": 99}]}, "written as 'value'"),
        ({"args": [{"pickle": "gASV"}]}, "written as 'pickle'"),
        ({"entry": 'x"""\nimport os'}, "is no name of an operator call"),
        ({"kwargs": {"dict": [["a=1);import os#", 1]]}}, "kwargs have names of Python"),
        ({"kwargs": [1]}, "kwargs have names of Python"),
        ({"direction": "sideways"}, "direction"),
        ({"step": "soon"}, "step"),
        ({"more": 1}, "more"),
    ],
)
def test_what_a_call_must_not_say_is_refused(
    sent: list[tuple[Any, RecordedRank, WireFrame]], change: dict[str, Any], why: str
) -> None:
    frame = sent[0][2]
    with pytest.raises(FrameError, match=why):
        read_call(WireFrame(Kind.CALL, {**frame.header, **change}, frame.payload), 0)


def test_deep_and_foreign_arguments_are_refused_on_both_sides(sent: list[tuple[Any, RecordedRank, WireFrame]]) -> None:
    unit, recorded, frame = sent[0]
    deep: Any = []
    for _ in range(40):
        deep = [deep]
    with pytest.raises(FrameError, match="nested more than"):
        read_call(WireFrame(Kind.CALL, {**frame.header, "args": deep}, frame.payload), 0)
    with pytest.raises(FrameError, match="cannot be written as JSON"):
        encode(WireFrame(Kind.PING, {"x": object()}))
    unit.call.kwargs = {"x": Opaque("thing", object())}
    with pytest.raises(CannotSend, match="an argument of type object is not sent"):
        call_frame(0, 0, unit, HeldValues(0) if not unit.call.args else recorded._store)  # pyright: ignore[reportArgumentType]
    unit.call.kwargs = None


def test_verdicts_keep_infinities_and_nan() -> None:
    judgements = [Judgement("bug", "far", float("inf"), (1, 2), float("nan"), 2.0, share=0.5, count=3), Judgement("exact")]
    frame = WireFrame(Kind.VERDICT, {"number": 3, "judgements": judgements_as_json(judgements), "source": "formula"})
    (arrived,) = Decoder(0).feed(encode(frame))
    checked = read(arrived, CallVerdict).checked("forward")
    assert repr(checked.judgements) == repr(judgements)
    with pytest.raises(FrameError, match="a VERDICT frame"):
        CallVerdict(number=1, judgements=[{"outcome": "fine"}]).checked("forward")


def test_mutated_frames_of_a_server_are_refused_or_read() -> None:
    draw = random.Random(1)
    judgements = [Judgement("bug", "far", float("inf"), (1, 2), float("nan"), 2.0, share=0.5, count=3), Judgement("exact")]
    verdict = {"number": 3, "judgements": judgements_as_json(judgements), "source": "formula", "nearer": "the server's"}
    outcomes = {"refused": 0, "read": 0}
    for turn in range(1000):
        kind, header, model = draw.choice([(Kind.VERDICT, verdict, CallVerdict), (Kind.WELCOME, {"window": 9}, Welcome)])
        header = orjson.loads(orjson.dumps(header))
        if turn % 2:
            change_a_leaf(draw, header)
        data = bytearray(encode(WireFrame(kind, header)))
        if not turn % 2:
            mutate(draw, data)
        try:
            for arrived in Decoder(0).feed(bytes(data)):
                found = read(arrived, model)
                outcomes["read"] += 1
                if isinstance(found, CallVerdict):
                    found.checked("forward")
        except FrameError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 300
    assert outcomes["read"] > 50


def test_a_call_that_asks_for_more_memory_than_there_is_is_not_run(tmp_path: Any) -> None:
    header = {
        **{"number": 1, "step": 0, "entry": "Torch.ones.0.forward", "module": "", "direction": "forward", "of_inputs": False},
        **{"name": "Torch.ones", "call": 0, "phase": "forward", "args": [[100_000, 100_000, 100]], "kwargs": {"dict": []}},
        **{"gradients": [], "results": [], "out": {"value": 0}},
        "values": [
            {"dtype": "torch.float32", "shape": [1], "device": "cpu", "requires_grad": False, "note": None, "tensor": "0"}
            | {"sharded": False}
        ],
    }
    from safetensors.torch import save

    call = read_call(WireFrame(Kind.CALL, orjson.loads(orjson.dumps(header)), save({"0": torch.ones(1)})), 0)
    verdict = CallJudge(Report(tmp_path, "run", 0), 0, None, "", 1 << 30)(call)
    assert (
        verdict.judgements[0]["reason"]
        == "its result would take 8000000000000 bytes, and the server holds 1073741824 (--max-bytes)"
    )


def test_the_plan_says_where_the_judge_is() -> None:
    from trainprobe.errors import PlanError

    def refused(**settings: Any) -> str:
        with pytest.raises(PlanError) as error:
            trainprobe.Probe(op_check=settings)
        return str(error.value)

    assert "10.0.0.7:7700 is another machine and there is no tls: give the folder" in refused(server="10.0.0.7:7700")
    assert "'here' is no HOST:PORT" in refused(server="here")
    assert "two roads to one machine" in refused(server="localhost:1", folder="x")
    assert "there is no server" in refused(tls="keys")
