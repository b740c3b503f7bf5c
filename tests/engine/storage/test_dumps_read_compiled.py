"""What the compiled part reads of a dump is what Python reads of it, to the bit, and errors are in the same words."""

from __future__ import annotations

import importlib
import json
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.dump_compare.hostile import repeated, strange_value, turned_bytes
from benchmarks.dump_compare.large import write_large
from trainprobe.compiled import native
from trainprobe.engine.core.records import Call, Opaque, Value
from trainprobe.engine.storage.dumps import read
from trainprobe.errors import FormatError

reader = importlib.import_module("trainprobe.engine.storage.dumps.read")
FIXTURES = Path(__file__).parents[2] / "interop" / "fixtures"
TENSOR = {
    "type": "torch.Tensor",
    "dtype": "torch.float32",
    "shape": [2, 3],
    "Max": 2.5,
    "Min": -1e-300,
    "Mean": 0.1,
    "Norm": 7.0,
}
OPS = {
    "Torch.add.0.forward": {
        "input_args": [
            {**TENSOR, "requires_grad": True},
            [{**TENSOR, "requires_grad": False, "checksum": "0xfedcba9876543210"}],
        ],
        "input_kwargs": {"alpha": {"type": "float", "value": -1.5e-7}, "größe": {"type": "str", "value": 'a"\n\u20ac'}},
        "output": [{**TENSOR, "Max": float("inf"), "Min": float("nan"), "Mean": 123456789012345678, "requires_grad": True}],
    },
    "Module.fc.Linear.forward.0": {
        "input_args": [{**TENSOR, "Mean": None, "requires_grad": None}, {**TENSOR, "md5": "0123abcd", "requires_grad": False}],
        "input_kwargs": {"peer": {"type": "P2POp", "tensor": {**TENSOR, "requires_grad": True}}},
        "output": [{**TENSOR, "shape": [], "requires_grad": False}, {**TENSOR, "shape": [1.5], "requires_grad": False}],
    },
}


def described(thing: Any, columns: dict[str, Any]) -> Any:
    """Everything that was read, with the numbers of a tensor in the place of its row."""
    if isinstance(thing, Value):
        numbers = {name: repr(column[thing.row]) if thing.row >= 0 else "" for name, column in columns.items()}
        about = [thing.dtype, thing.shape, thing.type, thing.requires_grad, thing.note, thing.tensor, thing.extra]
        return [*about, numbers, *map(type, thing.shape)]
    if isinstance(thing, Call):
        trees = [described(tree, columns) for tree in (thing.args, thing.kwargs, thing.params, thing.out)]
        return [thing.kind, thing.name, thing.call, thing.phase, thing.cls, thing.micro, *trees]
    if isinstance(thing, Opaque):
        return ["opaque", thing.type, repr(thing.value), repr(thing.extra)]
    if isinstance(thing, list):
        return [described(item, columns) for item in thing]
    if isinstance(thing, dict):
        return {key: described(item, columns) for key, item in thing.items()}
    return repr(thing)


def told(folder: Path) -> Any:
    try:
        step_data = read(folder)
    except FormatError as error:
        return str(error)
    columns = {**step_data.finished, **{f"no {name}": gone for name, gone in step_data.absent.items()}}
    if step_data.checksums is not None:
        columns["bits"] = step_data.checksums
    if step_data.crc32:
        columns["crc32"] = [step_data.crc32.get(row) for row in range(len(step_data.partials))]
    calls = [described(call, columns) for call in [*step_data.calls, *step_data.states]]
    return calls, step_data.notes, sorted(columns)


def both(folder: Path, monkeypatch) -> tuple[Any, Any]:
    compiled = told(folder)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "native", None)
        return compiled, told(folder)


@pytest.fixture
def dumps(tmp_path) -> list[Path]:
    """A dump of each sort: of another tool, large and indented, and one with all that a leaf may be."""
    large = write_large(tmp_path / "large", 23) / "step0" / "rank0"
    ops = tmp_path / "ops" / "step0" / "rank0"
    ops.mkdir(parents=True)
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    (ops / "dump.json").write_text(json.dumps({**head, "data": OPS}, ensure_ascii=False))
    others = sorted(path.parent for path in FIXTURES.rglob("dump.json"))
    assert len(others) >= 4
    return [large, ops, *others]


def test_the_compiled_part_reads_most_tensors(dumps):
    found = native.read_dump((dumps[0] / "dump.json").open("rb").read, reader.describe, json.loads, lambda name, entry: entry)
    assert found is not None
    assert len(found[3]) == 3 * 23
    assert np.frombuffer(found[1]).shape == (4 * 3 * 23,)


def test_numbers_are_the_doubles_that_python_reads(tmp_path):
    """Of few and many digits, with and without an exponent, and half-way between two doubles or next to it."""
    chance = random.Random(5)
    singles = np.random.default_rng(5).standard_normal(4000).astype(np.float32).astype(float) * 10.0 ** np.arange(-40, 40, 0.02)
    texts = [repr(x) for x in [*singles.tolist(), 5e-324, 2.0**-1074 * 3, 1.7976931348623157e308, -0.0]]
    texts += [f"{chance.randrange(10 ** chance.randrange(1, 20))}.{chance.randrange(10**9)}5" for _ in range(2000)]
    texts += [f"0.{'0' * chance.randrange(12)}{chance.randrange(1, 10**17)}" for _ in range(2000)]
    for _ in range(2000):  # the middle of two doubles, and the numbers around it that have as many digits
        middle = 2**53 + 2 * chance.randrange(2**51) + 1
        behind = chance.randrange(1, 4)
        scaled = middle * 5**behind  # over 10**behind: a half of 2**behind
        for digits in (scaled - 1, scaled, scaled + 1):
            texts.append(f"{digits // 10**behind}.{digits % 10**behind:0{behind}d}")
    texts += ["0.0", "-0.0", "-0.5", "9999999999999999999.0", "18446744073709551615.5", "0." + "0" * 26 + "7", "1e22", "1.5E-3"]
    found = native.read_dump(
        BytesIO(f"[{', '.join(texts)}]".encode()).read, reader.describe, json.loads, lambda name, entry: entry
    )
    assert found is not None
    assert list(map(repr, found[0])) == [repr(float(text)) for text in texts]


def test_both_read_the_same(dumps, monkeypatch):
    for folder in dumps:
        compiled, plain = both(folder, monkeypatch)
        assert not isinstance(plain, str)
        assert compiled == plain


def test_statistics_of_another_order_are_read_by_their_names(dumps, monkeypatch):
    path = dumps[1] / "dump.json"
    top = json.loads(path.read_text())
    top["trainprobe"] = {"wanted": ["norm", "max"]}
    path.write_text(json.dumps(top))
    compiled, plain = both(dumps[1], monkeypatch)
    assert compiled == plain


@pytest.mark.parametrize("change", [turned_bytes, repeated, strange_value])
def test_both_read_the_same_of_changed_files_or_say_the_same(dumps, monkeypatch, change):
    answers, errors = 0, 0
    for folder in (dumps[0], dumps[-1] if change is strange_value else dumps[1]):  # that one is changed as JSON without NaN
        for name in ("stack.json", "construct.json"):
            (folder / name).unlink(missing_ok=True)
        content = (folder / "dump.json").read_bytes()
        alone = folder.parent / "alone"
        alone.mkdir(exist_ok=True)
        for seed in range(120):
            (alone / "dump.json").write_bytes(content)
            change(alone, random.Random(seed))
            compiled, plain = both(alone, monkeypatch)
            assert compiled == plain, seed
            answers, errors = answers + 1, errors + isinstance(plain, str)
        (alone / "dump.json").unlink()
    assert 0 < errors < answers


PIECE = 1 << 20  # bytes that the compiled part holds at once


def test_a_dump_is_the_same_wherever_its_text_is_cut_into_pieces(dumps, monkeypatch):
    """The end of the first piece goes through all of the entries, and through what stands behind them."""
    path = dumps[1] / "dump.json"
    top = json.loads(path.read_text())
    with_header = {**top, "trainprobe": {"step": 0, "notes": ["12345"], "micro": 3}, "number": 123456}
    behind = len(json.dumps(with_header, ensure_ascii=False).encode()) - len(json.dumps({"task": ""}).encode())
    for left in range(0, behind + 30, 7):
        path.write_text(json.dumps({"task": "x" * (PIECE - left), **{**with_header, "task": None}}, ensure_ascii=False))
        compiled, plain = both(dumps[1], monkeypatch)
        assert compiled == plain, left
        with path.open("rb") as file:
            assert native.read_dump(file.read, reader.describe, json.loads, lambda name, entry: entry) is not None, left


def test_an_entry_may_be_larger_than_a_piece(dumps, monkeypatch):
    path = dumps[0] / "dump.json"
    top = json.loads(path.read_text())
    tensor = {**TENSOR, "requires_grad": True}
    many = [tensor] * 20_000
    top["data"]["Torch.stack.0.forward"] = {"input_args": [many, 1], "input_kwargs": {}, "output": many}
    top["data"]["Torch.add.0.forward"] = {"input_args": [tensor, tensor], "input_kwargs": {}, "output": [tensor]}
    path.write_text(json.dumps(top))
    assert path.stat().st_size > 2 * PIECE
    compiled, plain = both(dumps[0], monkeypatch)
    assert compiled == plain
    with path.open("rb") as file:
        found = native.read_dump(file.read, reader.describe, json.loads, lambda name, entry: entry)
    assert len(found[3]) == 3 * 23 + 2 * len(many) + 3


def test_values_of_a_call_are_made_whenever_they_are_asked_for(dumps):
    call = read(dumps[0]).calls[1]
    first, again = call.args, call.args
    assert [value.row for value in first] == [3, 4]
    assert all(
        x is not y and x.row == y.row and x.shape == y.shape == (4, 128, 1024) for x, y in zip(first, again, strict=True)
    )
    assert [value.row for value in call.out] == [5]
    assert call.out[0].requires_grad is True
    call.args = None
    assert call.args is None
