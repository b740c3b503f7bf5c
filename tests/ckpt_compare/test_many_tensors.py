"""What lets a million tensors be read and compared in little memory: compact directories, forgotten memos, batches of pairs."""

import collections
import gc
import pickle
import pickletools
import zipfile

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.ckpt_compare.verdicts import bytes_held, compared, judged
from trainprobe.ckpt_compare import compare as comparing
from trainprobe.ckpt_compare import formats
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.storage import pickle_fetches
from trainprobe.ckpt_compare.storage.pickle_fetches import perhaps_fetched
from trainprobe.ckpt_compare.storage.pickle_machine import Machine
from trainprobe.ckpt_compare.storage.torch_zip import Places, TorchZip
from trainprobe.ckpt_compare.tasks import merged
from trainprobe.engine.compare.uncollected import uncollected
from trainprobe.errors import FormatError

SHARED = ["é" * 300, "x"]
OBJECT = [
    SHARED, SHARED, (1, 2), {"a": SHARED, "b": 1.5, 3: 2**100, 4: 10**700}, b"bytes", b"x" * 300, {1, 2}, True, None,
    frozenset([1]), np.arange(3), collections.OrderedDict(a=1), -5, 70000, 2**40, "a\nb", bytearray(b"12"), (),
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_a_pickle_fetches_is_known_beforehand(protocol):
    data = pickle.dumps(OBJECT, protocol)
    assert set() != fetched(data) <= indices(perhaps_fetched(data))


def test_a_fetch_is_seen_where_the_search_goes_on(monkeypatch):
    monkeypatch.setattr(pickle_fetches, "_AT_ONCE", 7)
    for protocol in (0, 2, 4):
        data = pickle.dumps([held := [[i] for i in range(400)], held, *held], protocol)
        assert fetched(data) <= indices(perhaps_fetched(data))


def test_few_values_are_kept_that_nobody_fetches():
    data = pickle.dumps([(f"layers.{i}.hj", i) for i in range(20_000)], 4)
    assert len(indices(perhaps_fetched(data)) - fetched(data)) < 600


def fetched(data):
    """What the standard library says that a pickle fetches."""
    return {int(arg) for op, arg, _ in pickletools.genops(data) if op.name in ("GET", "BINGET", "LONG_BINGET")}


def indices(flags):
    return {index for index, flag in enumerate(flags) if flag}


DAMAGED = [b"", b"\x80", b"X\xff\xff\xff\xff", b"h", b"g5", b"gx\n.", b"\xff" * 9, b"(((h\x07", b"j\1"]


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_pickle_ends_the_search(data):
    assert isinstance(perhaps_fetched(data), bytearray)


class _Names:
    """Names without a meaning: lists, numbers and texts need none."""


def test_values_that_nobody_fetches_are_not_kept():
    data = pickle.dumps([(i, str(i)) for i in range(1000)] + [SHARED, SHARED], 2)
    machine = Machine(data, _Names(), alone=True)
    assert machine.run()[-2:] == [SHARED, SHARED]
    assert len(machine.memo) < 300, "of 2,000 tuples and texts"


def test_what_is_kept_of_a_pickle_is_no_longer_than_what_it_memoizes():
    """The bytes of numbers look like fetches of far indices: a byte for each of them would be as much as the pickle itself."""
    data = pickle.dumps([SHARED, SHARED, *(bytes([106, 0, 0, n, 1]) for n in range(256))], 5)
    memoizing = sum(op.name == "MEMOIZE" for op, _, _ in pickletools.genops(data))
    assert len(perhaps_fetched(data)) <= memoizing + 200  # bytes of numbers look like that opcode too
    assert fetched(data) <= indices(perhaps_fetched(data))


def test_a_value_under_a_far_index_is_found():
    """Opcode r gives any index; no other tells how far they go."""
    data = b"\x80\x02]" + b"r" + (1 << 28).to_bytes(4, "little") + b"K\x07aj" + (1 << 28).to_bytes(4, "little") + b"\x86."
    machine = Machine(data, _Names(), alone=True)
    one, two = machine.run()
    assert one is two == [7]
    assert len(machine.memo) == 1


def test_places_are_those_that_zipfile_knows(tmp_path):
    held = {f"layer{i}": torch.randn(i % 7 + 1, 3) for i in range(150)}
    torch.save(held, tmp_path / "x.pt")
    archive = TorchZip(str(tmp_path / "x.pt"), 0, (tmp_path / "x.pt").stat().st_size)
    places, raw = archive.places(), (tmp_path / "x.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "x.pt") as theirs:
        names = [n for n in theirs.namelist() if "/data/" in n]
        assert len(names) == 150
        for name in names:
            start, size = places.get(name.rpartition("/")[2])
            assert raw[start : start + size] == theirs.read(name)
        assert archive.read(archive.pickled) == theirs.read("x/data.pkl")
    assert places.get("150") is places.get("007") is places.get("-1") is places.get("٣") is None


def test_places_of_any_key_and_a_repeated_one_is_refused():
    places = Places()
    for number, key in enumerate(["0", "1", "cpu", "2"]):
        places.add(key, 10 * number, number)
    for key in ("1", "cpu", "2"):
        with pytest.raises(FormatError, match=f"storage {key} is there twice"):
            places.add(key, 50, 5)
    assert [places.get(k) for k in ("0", "1", "cpu", "2", "3", "4")] == [(0, 0), (10, 1), (20, 2), (30, 3), None, None]


def test_an_archive_of_more_members_than_the_old_directory_can_count(tmp_path):
    """Beyond 65,535 members the directory is that of zip64."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as made:
        for i in range(65_540):
            made.writestr(f"x/data/{i}", str(i))
        made.writestr("x/data.pkl", pickle.dumps({"a": 1}, 2))
    archive = TorchZip(str(tmp_path / "x.pt"), 0, (tmp_path / "x.pt").stat().st_size)
    start, size = archive.places().get("65537")
    assert (tmp_path / "x.pt").read_bytes()[start : start + size] == b"65537"


def test_a_pickle_that_is_not_as_it_was_written_is_refused(tmp_path):
    torch.save({"weight": torch.ones(3)}, tmp_path / "x.pt")
    raw = bytearray((tmp_path / "x.pt").read_bytes())
    raw[raw.index(b"weight")] ^= 1
    (tmp_path / "x.pt").write_bytes(raw)
    with pytest.raises(FormatError, match="not as it was written: its checksum is another one"):
        open_checkpoint(tmp_path / "x.pt")


def folder_without_its_optimizer(path):
    torch.save({"module": {"w": torch.ones(2)}}, path / "mp_rank_00_model_states.pt")
    torch.save({"something": 1}, path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def test_what_a_reader_does_not_know_is_no_damage(tmp_path):
    folder_without_its_optimizer(tmp_path)
    with pytest.raises(
        FormatError, match=r"as torch\.save wrote them.*KeyError: 'optimizer_state_dict' in deepspeed\.py, line"
    ):
        open_checkpoint(tmp_path)


def test_where_no_checksum_speaks_for_the_file_it_may_be_damaged(tmp_path):
    folder_without_its_optimizer(tmp_path)
    torch.save({"something": 1}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match="it may be damaged"):
        open_checkpoint(tmp_path)


@pytest.fixture
def pair(tmp_path):
    a = {f"w{i}": np.arange(i + 1, dtype=np.float32) + 1 for i in range(23)}
    b = {**{k: v.copy() for k, v in a.items() if k != "w3"}, "more": np.ones(2, np.float32)}
    b["w17"][5] += 1
    for name, held in (("a", a), ("b", b)):
        save_file(held, tmp_path / f"{name}.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


@pytest.mark.parametrize("at_once", [1, 5, 1000])
def test_batches_of_pairs_change_nothing(pair, monkeypatch, at_once):
    whole = compared(*pair)
    monkeypatch.setattr(comparing, "AT_ONCE", at_once)
    assert compared(*pair).rows == whole.rows
    assert judged(*pair).sentence.startswith("differ: 1 of 24 tensors; worst is w17: relative error")


def test_neighbouring_spans_are_let_go_together():
    assert merged([(100, 160), (0, 40), (40, 99), (9000, 9000), (9000, 9100)], 10) == [(0, 160), (9000, 9100)]


def test_the_collector_goes_on_after_a_pause():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_tensor_of_a_comparison_takes_little_memory(tmp_path):
    """Both sides and the row between them: a million take less than 1 GB with the interpreter and what is at work."""
    count = 5_000
    values = {f"layers.{i // 500}.experts.{i % 500}.weight": np.full((1, 3), i, np.float32) for i in range(count)}
    for side in "ab":
        save_file(values, tmp_path / f"{side}.safetensors")
    held = bytes_held(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert held < 720  # 600 with more tensors, whose dicts are fuller


def test_formats_of_other_packages_are_looked_up_once(tmp_path, monkeypatch):
    """Finding them reads the metadata of each installed package, which took most of the time of opening a file."""
    asked = []
    monkeypatch.setattr(formats, "entry_points", lambda **kind: asked.append(kind) or ())
    formats._foreign.cache_clear()
    save_file({"weight": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    assert judged(tmp_path / "x.safetensors", tmp_path / "x.safetensors").code == 0
    formats._foreign.cache_clear()
    assert asked == [{"group": "trainprobe.checkpoint_formats"}]
