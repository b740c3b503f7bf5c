"""Which call belongs to which: by name where names are whole, by order where ops are numbered."""

from __future__ import annotations

import operator as python

import pytest
import torch

import trainprobe
from trainprobe.dump_compare.pairing import operator, pair_calls
from trainprobe.engine.core.records import Call
from trainprobe.engine.storage.dumps import read

BITWISE = ("and", "or", "xor", "lshift", "rshift")
BINARY = ("add", "sub", "mul", "truediv", "matmul", "pow", "mod", "floordiv", *BITWISE, "eq", "ne", "lt", "le", "gt", "ge")
BITWISE_IN_PLACE = ("iand", "ior", "ixor", "ilshift", "irshift")
IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ipow", "imod", *BITWISE_IN_PLACE)


def recorded(folder, run) -> str:
    """Return the name by which the probe records what `run` does."""
    model = torch.nn.Identity()
    with trainprobe.watch(model, output=folder, level="L1") as probe, probe.step():
        run()
    return read(folder / "step0").calls[-1].name


@pytest.mark.parametrize("name", BINARY)
def test_an_operator_has_one_name_whoever_records_it(tmp_path, name):
    x = torch.ones(2, 2, dtype=torch.int64 if name in BITWISE else torch.float32)
    run = getattr(python, f"{name}_" if name in ("and", "or") else name)
    assert operator(recorded(tmp_path, lambda: run(x, x))) == operator(f"Tensor.__{name}__")


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_operator_in_place_has_one_name(tmp_path, name):
    x = torch.ones(2, 2, dtype=torch.int64 if name in BITWISE_IN_PLACE else torch.float32)
    assert operator(recorded(tmp_path, lambda: getattr(python, name)(x, x))) == operator(f"Tensor.__{name}__")


@pytest.mark.parametrize("name", ["radd", "rsub", "rmul", "rtruediv", "rpow"])
def test_an_operator_from_the_right_has_one_name(tmp_path, name):
    run = getattr(python, name[1:])
    assert operator(recorded(tmp_path, lambda: run(2.0, torch.ones(2)))) == operator(f"Tensor.__{name}__")


@pytest.mark.parametrize("name", ["neg", "abs", "invert"])
def test_an_operator_of_one_has_one_name(tmp_path, name):
    x = torch.ones(2, dtype=torch.int64)
    assert operator(recorded(tmp_path, lambda: getattr(python, name)(x))) == operator(f"Tensor.__{name}__")


def names(*ops: str) -> list[Call]:
    counts: dict[str, int] = {}
    calls = []
    for op in ops:
        calls.append(Call("op", op, counts.get(op, 0), "forward"))
        counts[op] = counts.get(op, 0) + 1
    return calls


def paired(a: list[Call], b: list[Call]) -> list[tuple[str | None, str | None]]:
    return [tuple(call and f"{call.name}{call.call}" for call in (pair.a, pair.b)) for pair in pair_calls(a, b)]


def test_one_more_op_leaves_the_others_their_partners():
    found = paired(names("t", "add", "mul", "add"), names("t", "add", "add", "mul", "add"))
    assert [pair for pair in found if None in pair] in ([(None, "add0")], [(None, "add1")])
    assert found[-1] == ("add1", "add2") and ("mul0", "mul0") in found


def test_ops_within_another_module_are_others():
    a, b = names("add", "add"), names("add", "add")
    a[0].parent, b[1].parent = (Call("module", "layers.0", 0, "forward") for _ in range(2))
    assert ("add0", "add1") in paired(a, b)


def test_the_model_itself_needs_no_partner_where_a_tool_leaves_it_out():
    root, inner = Call("module", "root", 0, "forward"), Call("module", "fc", 0, "forward")
    assert paired([root, inner], [Call("module", "fc", 0, "forward")]) == [("fc0", "fc0")]
    assert paired([root, inner], [Call("module", "root", 0, "forward")]) == [("root0", "root0"), ("fc0", None)]
