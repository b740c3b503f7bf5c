"""Nothing in a checkpoint runs: pickles are read as data, and what would run elsewhere is an inert object and a warning."""

import argparse
import collections
import datetime
import functools
import http
import os
import pickle
import pickletools
import re
import signal
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from trainprobe.ckpt_compare.compare import compare
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.storage import inert_objects, inert_pickle, remarks, torch_archive
from trainprobe.ckpt_compare.storage.inert_objects import Thing
from trainprobe.ckpt_compare.storage.inert_pickle import read_pickle
from trainprobe.ckpt_compare.verdict import verdict_of
from trainprobe.errors import FormatError


class Calls:
    """Pickles into a call of any function."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.fixture
def trap(tmp_path):
    """A file that a crafted pickle would create if it ran."""
    path = tmp_path / "it_ran"
    yield path
    assert not path.exists()


def crafted(trap):
    touch = f"open({str(trap)!r}, 'w').close()"
    get = Calls(getattr, Calls(__import__, "os"), "system")
    yield "system", Calls(os.system, f"touch {trap}")
    yield "eval", Calls(eval, touch)
    yield "exec", Calls(exec, touch)
    yield "open", Calls(open, str(trap), "w")
    yield "__import__", get
    yield "touch", Calls(Path.touch, trap)
    yield "pickle.loads", Calls(pickle.loads, pickle.dumps(Calls(os.system, f"touch {trap}")))
    yield "torch.serialization.load", Calls(torch.load, str(trap))
    yield "numpy", Calls(np.load, str(trap), None, True)


def test_no_crafted_pickle_runs_and_each_is_said_aloud(trap):
    for name, payload in crafted(trap):
        with remarks.collected() as made:
            found = read_pickle(pickle.dumps({"a": payload, "kept": 1}), name)
        assert isinstance(found["a"], Thing), name
        assert found["kept"] == 1
        assert any(name in said and "would run code" in said for said in made.warnings), name
        assert not trap.exists(), name


def test_a_crafted_torch_file_is_read_with_a_warning_that_names_what_it_would_run(tmp_path, trap):
    torch.save({"model": {"w": torch.zeros(2)}, "x": Calls(os.system, f"touch {trap}")}, tmp_path / "evil.pt")
    found = open_checkpoint(tmp_path / "evil.pt")
    assert list(found.tensors) == ["w"]
    assert not found.problems
    assert re.search(r"evil\.pt names (posix|nt)\.system, which would run code", found.warnings[0])
    assert verdict_of(compare(found, found)).details[0].startswith("A: warning: ")


def test_a_crafted_file_in_the_layout_before_torch_1_6_is_read_with_a_warning(tmp_path, trap):
    held = {"model": {"w": torch.zeros(2)}, "x": Calls(os.system, f"touch {trap}")}
    torch.save(held, tmp_path / "evil.pt", _use_new_zipfile_serialization=False)
    found = open_checkpoint(tmp_path / "evil.pt")
    assert list(found.tensors) == ["w"]
    assert found.warnings


def test_a_tensor_that_depends_on_code_is_refused_by_name_and_the_others_are_read(tmp_path, trap):
    class Hidden(torch.Tensor):
        def __reduce_ex__(self, protocol):
            return torch._utils._rebuild_tensor_v2, (Calls(os.system, f"touch {trap}"), 0, (2,), (1,), False, {})

    held = {"w": torch.zeros(2), "bad": torch.zeros(2).as_subclass(Hidden), "worse": Calls(os.system, f"touch {trap}")}
    torch.save({"model": held}, tmp_path / "evil.pt")
    found = open_checkpoint(tmp_path / "evil.pt")
    assert list(found.tensors) == ["w"]
    said = {p.where.rpartition(" ")[2]: p.message for p in found.problems}
    assert "depends on posix.system, which would run code" in said["model.bad"]
    assert "would be the result of posix.system" in said["worse"]
    assert verdict_of(compare(found, found)).code == 3


def test_the_old_instance_opcodes_build_inert_objects(trap):
    for code in (f"(S'touch {trap}'\nios\nsystem\n.".encode(), f"(cos\nsystem\nS'touch {trap}'\no.".encode()):
        with remarks.collected() as made:
            assert read_pickle(code, "old opcodes").name == "os.system"
        assert made.warnings


def real_arguments():
    """Values of the kinds that the argument namespace of Megatron-LM 0.16 holds."""
    from dataclasses import dataclass

    @dataclass
    class Config:
        width: int = 64

    Config.__qualname__, Config.__module__ = "Config", __name__
    globals()["Config"] = Config
    return argparse.Namespace(
        exit_signal=signal.SIGTERM, dtype=torch.bfloat16, path=Path("/data/x"), config=Config(), num_layers=4,
        init=functools.partial(torch.nn.init.normal_, std=0.02), function=torch.nn.functional.gelu, size=torch.Size([2]),
        device=torch.device("cpu"), enum=http.HTTPStatus.OK, when=datetime.timedelta(minutes=5), none=None,
        nested={"a": argparse.Namespace(b=[signal.SIGINT])},
    )  # fmt: skip


def test_arguments_of_any_class_cost_nothing_but_their_own_value(tmp_path):
    torch.save({"args": real_arguments(), "model": {"w": torch.ones(3)}}, tmp_path / "x.pt")
    found = open_checkpoint(tmp_path / "x.pt")
    args = found.state["args"]
    assert (args["args.num_layers"], args["args.exit_signal"]) == (4, "Signals(15)")
    assert (args["args.config.width"], args["args.dtype"], args["args.device"]) == (64, "bfloat16", "cpu")
    assert "std" in str({k: v for k, v in args.items() if k.startswith("args.init")})
    assert (list(found.tensors), found.problems, found.warnings) == (["w"], (), ())


def test_a_stand_in_class_cannot_be_changed_by_a_pickle():
    # BUILD on the class argparse.Namespace itself, with slot state {"__setstate__": 1}
    code = b"\x80\x02cargparse\nNamespace\n(N}U\x0c__setstate__K\x01stb."
    with pytest.raises(FormatError):
        read_pickle(code, "class state")


def test_a_function_of_the_table_cannot_be_changed_by_a_pickle():
    code = b"\x80\x02ccollections\nOrderedDict\n(N}U\x05_callK\x01stb."
    with pytest.raises(FormatError):
        read_pickle(code, "function state")
    assert read_pickle(pickle.dumps(collections.OrderedDict(a=1)), "after") == {"a": 1}


def test_getattr_gives_an_inert_object():
    found = read_pickle(b"c__builtin__\ngetattr\n(c__builtin__\ndict\nS'fromkeys'\ntR.", "getattr")
    assert (found.name, found.args) == ("builtins.dict", ("fromkeys",))


def test_arrays_of_objects_are_refused():
    with pytest.raises(FormatError):
        read_pickle(pickle.dumps(np.array([1, "a"], dtype=object)), "objects")


def test_a_namespace_is_read_as_data():
    found = read_pickle(pickle.dumps(argparse.Namespace(layers=4, name="tiny", nested=argparse.Namespace(a=1))), "namespace")
    assert (found.name, found["layers"], found["nested"]["a"]) == ("argparse.Namespace", 4, 1)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_comes_back_as_it_was_in_every_protocol(protocol):
    data = {
        "a": [1, 2.5, None, True, "text", b"bytes"], "t": (1, (2,)), "s": {1, 2}, "f": frozenset({3}), "big": 2**80,
        "o": collections.OrderedDict(x=1), "d": collections.defaultdict(list, k=[1]), "c": 1 + 2j,
    }  # fmt: skip
    assert read_pickle(pickle.dumps(data, protocol), "data") == data


def test_numpy_arrays_and_scalars_come_back_as_they_were():
    array, scalar = np.arange(12, dtype=">f4").reshape(3, 4), np.float64(2.5)
    found = read_pickle(pickle.dumps([array, np.asfortranarray(array), scalar]), "numpy")
    assert np.array_equal(found[0].value, array)
    assert np.array_equal(found[1].value, array)
    assert found[2] == 2.5


def test_a_random_state_can_be_read():
    found = read_pickle(pickle.dumps(np.random.RandomState(3).get_state()), "rng")
    assert np.array_equal(found[1].value, np.random.RandomState(3).get_state()[1])


def test_a_damaged_pickle_is_a_format_error_with_the_file_s_name():
    whole = pickle.dumps({"a": list(range(100))})
    for cut in range(1, len(whole) - 1, 7):
        with pytest.raises(FormatError, match="some file"):
            read_pickle(whole[:cut], "some file")


def test_names_are_never_functions():
    """A name is text until it is called, so that nothing of ours can be reached or changed through it."""
    for name in (*inert_objects.CALLS, *torch_archive._REBUILD, "os.system", "torch.float32"):
        module, _, short = name.rpartition(".")
        assert isinstance(inert_pickle._Table("x", torch_archive._REBUILD, None).find(module, short), str), name


def test_no_table_entry_imports_or_runs_what_a_file_names():
    names = set(inert_objects.CALLS) | set(torch_archive._REBUILD)
    dangerous = ("eval", "exec", "compile", "open", "system", "__import__", "import_module", "load_library", "apply")
    assert not [n for n in names if n.rsplit(".", 1)[-1] in dangerous]


def test_optimised_streams_and_every_opcode_that_the_library_writes_are_read():
    shared = ["x" * 300, 2**70, -(2**40), b"y" * 300, 1.5, 70000, "ü\ud800"]
    data = {"a": [shared, shared], **{str(i): i for i in range(300)}, "set": {1, (2, 3)}, "tuple": (1, 2, 3, 4)}
    for protocol in range(6):
        for stream in (pickle.dumps(data, protocol), pickletools.optimize(pickle.dumps(data, protocol))):
            found = read_pickle(stream, "stream")
            assert found == data
            assert found["a"][0] is found["a"][1]


HOSTILE = {
    "2^60 paths by memo": b"\x80\x04]" + b"\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(60)) + b".",
    "a key of 2^60 paths": b"\x80\x04})\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(60)) + b"K\x01s.",
    "a memo index of 2^28": b"\x80\x02]r\x00\x00\x00\x10.",
    "nesting of 10^5": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a nested key of 10^5": b"\x80\x02})" + b"\x85" * 100_000 + b"K\x01s.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a text of 2^60 bytes": b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b".",
    "an integer of 2^31 bytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a frame of 2^60 bytes": b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little"),
    "an opcode of nobody": b"\x80\x02\xff.",
    "marks without end": b"\x80\x02" + b"(" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_stream_is_a_sentence_and_costs_no_more_than_its_length(name):
    tracemalloc.start()
    started = time.process_time()
    try:
        if name == "a memo index of 2^28":
            assert read_pickle(HOSTILE[name], "some file") == []
        else:
            with pytest.raises(FormatError, match=r"^some file holds a pickle that cannot be read: .+"):
                read_pickle(HOSTILE[name], "some file")
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 10
