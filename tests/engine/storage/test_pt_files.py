"""Tensors in `.pt` files: large ones are mapped into memory, and their elements are those that were saved, in whatever way."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainprobe.engine.storage.dumps.tensor_store import TensorStore  # noqa: E402
from trainprobe.errors import FormatError, UnsafeFile  # noqa: E402

ROWS = 1 << 10  # of 1024 elements: above the size from which files are mapped
NAME = "a.pt"


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "dump_tensor_data").mkdir()
    return tmp_path / "dump_tensor_data" / NAME


def _array(path: Path) -> np.ndarray:
    return TensorStore(path.parents[1]).array(NAME)


def _deflated(tensor: torch.Tensor, path: Path) -> None:
    """Save a tensor, and compress the file anew, which torch itself does not do."""
    torch.save(tensor, path)
    with zipfile.ZipFile(path) as file:
        members = [(member.filename, file.read(member)) for member in file.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members:
            file.writestr(name, content)


SAVED: dict[str, Callable[[torch.Tensor, Path], None]] = {
    "as torch does": torch.save,
    "in the older format": lambda tensor, path: torch.save(tensor, path, _use_new_zipfile_serialization=False),
    "compressed": _deflated,
    "transposed": lambda tensor, path: torch.save(tensor.t(), path),
    "part of a larger one": lambda tensor, path: torch.save(torch.cat([tensor, tensor])[ROWS:], path),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("way", SAVED)
def test_the_elements_are_those_that_were_saved(path, way, dtype):
    tensor = (torch.randn(ROWS, 1024, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    SAVED[way](tensor, path)
    found, wanted = _array(path), tensor.t() if way == "transposed" else tensor
    assert np.array_equal(found, (wanted.float() if dtype == torch.bfloat16 else wanted).numpy())
    assert found.flags.aligned


def _resident() -> int:
    """Return the memory of this process that is in use and not of a file, in bytes."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells what memory is of a file")
def test_a_large_file_is_mapped_and_not_copied(path):
    torch.save(torch.ones(16 * ROWS, 1024), path)  # 64 MiB
    _array(path).sum()
    before = _resident()
    found = _array(path)
    assert found.sum() == found.size
    assert _resident() - before < 8 << 20


def test_what_would_run_code_is_not_loaded_however_large(path):
    class Runs:
        def __reduce__(self):
            return print, ("x" * (2 << 20),)

    torch.save(Runs(), path)
    assert path.stat().st_size > 1 << 20
    with pytest.raises(UnsafeFile, match="could run code"):
        _array(path)


@pytest.mark.parametrize("kept", [0.0, 0.4, 0.999], ids=lambda kept: f"{kept} of it")
def test_a_file_that_was_cut_off_is_an_error(path, kept):
    torch.save(torch.ones(ROWS, 1024), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(FormatError, match=r"a\.pt cannot be read as a tensor"):
        _array(path)


def test_changed_bytes_are_read_as_they_are_or_are_an_error(path):
    """Of the directory of the zip file and of its first member, where sizes and places of the others stand."""
    torch.save(torch.ones(ROWS, 1024), path)
    whole = path.read_bytes()
    for place in [*range(0, 600, 7), *range(len(whole) - 800, len(whole), 5)]:
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        try:
            found = _array(path)
        except (FormatError, UnsafeFile):
            continue
        assert found.shape == (ROWS, 1024), place
