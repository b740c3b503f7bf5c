"""Files of other programs that are not read here: each is refused with what it is and the way to compare what it holds."""

from __future__ import annotations

import tarfile
import zipfile
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from trainprobe.engine.storage.safe_files import open_to_read, regular
from trainprobe.errors import FormatError


class _ForeignKind(NamedTuple):
    """what: kind of file or folder; way: how to compare what is in it, FILE being its name."""

    what: str
    way: str


def _arrays(of: str, what: str) -> _ForeignKind:
    """Return a kind of which an expression gives the arrays by name."""
    way = f"write its arrays with safetensors.numpy.save_file({of}, 'out.safetensors'), in both, and compare these files"
    return _ForeignKind(what, way)


def _saved(of: str, what: str) -> _ForeignKind:
    """Return a kind of which an expression gives the tensors by name."""
    return _ForeignKind(what, f"write its tensors with torch.save({of}, 'out.pt'), in both, and compare these files")


_BEGINNINGS = {
    b"GGUF": _ForeignKind(
        "a GGUF file (llama.cpp)",
        "its weights are mostly quantized in blocks. Compare the checkpoint that it was made from; or let transformers write "
        "its weights back, AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE).save_pretrained(out), and compare "
        "`out` with --rtol, as quantizing changed the values",
    ),
    b"\x89HDF\r\n\x1a\n": _arrays("{w.path: w.numpy() for w in model.weights}", "an HDF5 file (as Keras writes weights)"),
    b"\x93NUMPY": _arrays("{'it': numpy.load(FILE)}", "a single NumPy array"),
    b"\x1f\x8b": _ForeignKind(
        "a file that gzip compressed", "unpack it (tar -xf FILE, or gunzip FILE), and compare what was in it"
    ),
}
_ENDINGS = {
    ".keras": _arrays("{w.path: w.numpy() for w in keras.saving.load_model(FILE).weights}", "a model of Keras"),
    ".onnx": _arrays("{i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(FILE).graph.initializer}", "an ONNX model"),
    ".msgpack": _arrays(
        "flax.traverse_util.flatten_dict(flax.serialization.msgpack_restore(open(FILE, 'rb').read()), sep='.')",
        "a MessagePack file (as Flax writes weights)",
    ),
    ".npz": _arrays("dict(numpy.load(FILE))", "an archive of NumPy arrays"),
    ".pt2": _saved("torch.export.load(FILE).state_dict", "a program of torch.export"),
    ".pdparams": _arrays("{k: v.numpy() for k, v in paddle.load(FILE).items()}", "a file of PaddlePaddle"),
}
_ITEM = "point to the folder of one of its items, which has a file _METADATA (such as default, below the number of a step)"
_FOLDERS = {  # a name in the folder → what the folder is
    ".snapshot_metadata": _saved("torchsnapshot.Snapshot(FILE).get_state_dict_for_key('model')", "a snapshot of torchsnapshot"),
    "_METADATA": _arrays(
        "flax.traverse_util.flatten_dict(orbax.checkpoint.StandardCheckpointer().restore(os.path.abspath(FILE)), sep='.')",
        "a checkpoint of Orbax (JAX)",
    ),
    "_CHECKPOINT_METADATA": _ForeignKind("a step of an Orbax CheckpointManager (JAX)", _ITEM),
    "*/_CHECKPOINT_METADATA": _ForeignKind("a folder of steps of an Orbax CheckpointManager (JAX)", _ITEM),
    "saved_model.pb": _arrays("{v.name: v.numpy() for v in tf.saved_model.load(FILE).variables}", "a SavedModel of TensorFlow"),
    "*.memmap": _saved("tensordict.TensorDict.load_memmap(FILE).to_dict()", "a memory-mapped TensorDict"),
}
WEIGHTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".h5", ".distcp")
_MEMBERS = 1000  # of an archive that are looked at


def refuse(path: Path) -> None:
    """Raise FormatError for a file of another program, or a folder of such files, that says what to compare instead."""
    if path.is_dir():
        for name, kind in _FOLDERS.items():
            if any(path.glob(name)):
                raise _refusal(path, kind)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            _refuse_file(file)


def _refuse_file(file: Path) -> None:
    with open_to_read(file) as content:
        head = content.read(8)
    known = next((kind for start, kind in _BEGINNINGS.items() if head.startswith(start)), _ENDINGS.get(file.suffix))
    if known is not None:
        raise _refusal(file, known)
    inside = [name for name in _members(file, head) if name.endswith(WEIGHTS)]
    if inside:
        command = f"unzip {file.name} -d folder" if head.startswith(b"PK") else f"tar -xf {file.name} -C folder"
        what = f"an archive with {', '.join(inside[:3])}{' …' if len(inside) > 3 else ''} in it"
        raise _refusal(file, _ForeignKind(what, f"unpack it ({command}), and compare these files of both"))


def _members(file: Path, head: bytes) -> list[str]:
    """Return the names in a zip or tar archive; none of any other file."""
    try:
        if head.startswith(b"PK"):  # a tar archive ends with a zip archive where torch.save wrote its last member
            with zipfile.ZipFile(regular(file)) as archive:
                return archive.namelist()
        with tarfile.open(regular(file), "r:") as archive:
            return [member.name for member in islice(archive, _MEMBERS)]
    except (zipfile.BadZipFile, tarfile.TarError, NotImplementedError, ValueError, OSError):
        return []


def _refusal(path: Path, kind: _ForeignKind) -> FormatError:
    way = kind.way.replace("FILE", repr(path.name))
    return FormatError(f"{path} is {kind.what}, which ckpt-compare and ckpt-show do not read: {way}")
