"""Nothing in a checkpoint runs: pickles are read as data or refused with what they wanted to import."""

import argparse
import collections
import io
import os
import pickle
import pickletools
from pathlib import Path

import numpy as np
import pytest
import torch

from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.storage import inert_pickle, torch_archive
from trainprobe.ckpt_compare.storage.inert_pickle import Thing, read_pickle
from trainprobe.errors import FormatError, UnsafeFile


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
    yield "os.system", Calls(os.system, f"touch {trap}")
    yield "eval", Calls(eval, touch)
    yield "exec", Calls(exec, touch)
    yield "open", Calls(open, str(trap), "w")
    yield "getattr on a module", get
    yield "Path.touch", Calls(Path.touch, trap)
    yield "pickle.loads inside", Calls(pickle.loads, pickle.dumps(Calls(os.system, f"touch {trap}")))
    yield "torch.load inside", Calls(torch.load, str(trap))
    yield "numpy.load", Calls(np.load, str(trap), None, True)


def test_every_crafted_pickle_is_refused_before_it_runs(trap):
    for name, payload in crafted(trap):
        with pytest.raises(UnsafeFile):
            read_pickle(pickle.dumps({"a": payload}), name)
        assert not trap.exists(), name


def test_a_crafted_torch_file_is_refused_with_what_it_wanted_to_import(tmp_path, trap):
    torch.save({"model": {"w": torch.zeros(2)}, "x": Calls(os.system, f"touch {trap}")}, tmp_path / "evil.pt")
    with pytest.raises(UnsafeFile, match=r"would import (posix|nt)\.system"):
        open_checkpoint(tmp_path / "evil.pt")


def test_a_crafted_file_in_the_layout_before_torch_1_6_is_refused(tmp_path, trap):
    torch.save({"x": Calls(os.system, f"touch {trap}")}, tmp_path / "evil.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeFile):
        open_checkpoint(tmp_path / "evil.pt")


def test_the_old_instance_opcodes_are_refused(trap):
    for code in (f"(S'touch {trap}'\nios\nsystem\n.".encode(), f"(cos\nsystem\nS'touch {trap}'\no.".encode()):
        with pytest.raises(UnsafeFile):
            read_pickle(code, "old opcodes")


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


def test_getattr_works_on_stand_ins_alone():
    with pytest.raises(UnsafeFile):
        read_pickle(b"c__builtin__\ngetattr\n(c__builtin__\ndict\nS'fromkeys'\ntR.", "getattr")


def test_arrays_of_objects_are_refused():
    with pytest.raises(FormatError):
        read_pickle(pickle.dumps(np.array([Thing], dtype=object)), "objects")


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


def test_every_callable_of_the_table_is_frozen():
    assert all(type(v) is inert_pickle._Frozen for v in inert_pickle._TABLE.values())
    with pytest.raises(UnsafeFile):
        inert_pickle._TABLE["collections.OrderedDict"].anything = 1


def test_no_table_entry_imports_or_runs_what_a_file_names():
    names = set(inert_pickle._TABLE) | set(torch_archive._REBUILD)
    dangerous = ("eval", "exec", "compile", "open", "system", "__import__", "import_module", "load_library", "apply")
    assert not [n for n in names if n.rsplit(".", 1)[-1] in dangerous]


def test_real_opcodes_stay_readable():
    """The reader is the C unpickler: streams made by pickletools.optimize are fine as well."""
    data = pickletools.optimize(pickle.dumps({"a": [1, 2, 3]}))
    assert read_pickle(io.BytesIO(data), "stream") == {"a": [1, 2, 3]}
