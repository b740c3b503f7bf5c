"""Fingerprints and statistics of many tensors, worked out where they live and brought to the host in one transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainprobe.engine.arrays.torch_arrays import TorchStatsRows, local_of
from trainprobe.engine.arrays.torch_checksum import consecutive_keys, row_fingerprints, terms, words
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import CHECKSUM, STATS

STATISTICS = ("min", "max", "mean", "norm")
MOST_ROWS = 4096  # samples of a batch that get a fingerprint of their own
MOST_PADDED_ROWS = 512  # samples of a batch among which padding is looked for
LARGEST_ROWS = 1 << 22  # elements of a batch whose samples get one


class TensorFingerprints:
    """Takes tensors under names; `content` waits for the device and may be called on another thread."""

    def __init__(self) -> None:
        self._stats = TorchStatsRows(STATS | CHECKSUM)
        self._entries: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, int] = {}
        self._samples: dict[str, Tensor] = {}
        self._unpadded: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}
        self._ready: Any = None

    def add(self, name: str, tensor: Tensor, *, samples: bool = False, tokens: int = 0, **more: Any) -> None:
        """Add one tensor. samples: also a fingerprint of each index of dimension 0. tokens: also its first so many elements."""
        if is_lazy(tensor):
            self._entries[name] = {"shape": [], "dtype": str(tensor.dtype).removeprefix("torch."), "note": "has no shape yet"}
            return
        entry: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), **more}
        self._entries[name] = entry
        inner, _, extra, note = local_of(tensor.detach())
        if extra:
            entry |= {"shard": extra, "local_shape": list(inner.shape) if inner is not None else None}
        row = -1 if inner is None else self._stats.add(inner)
        if row < 0 or inner is None:
            entry["note"] = note or (self._stats.refusal(inner) if inner is not None else "cannot be read")
            return
        self._rows[name] = row
        if samples and inner.dim() > 0 and 0 < inner.shape[0] <= MOST_ROWS and 0 < inner.numel() <= LARGEST_ROWS:
            self._samples[name] = row_fingerprints(inner)
            if inner.dim() == 2 and not inner.is_floating_point() and not inner.is_complex():
                self._add_unpadded(name, inner)
        if tokens and not inner.is_floating_point() and not inner.is_complex():
            self._tokens[name] = inner.reshape(-1)[:tokens].clone()

    def _add_unpadded(self, name: str, inner: Tensor) -> None:
        rows = unpadded_fingerprints(inner)
        if rows is not None:
            self._unpadded[name] = rows

    def seal(self) -> None:
        """Say that all was added: what is under way on a device now is what `content` has to wait for."""
        if torch.cuda.is_initialized():
            self._ready = torch.cuda.Event()
            self._ready.record()

    def content(self) -> dict[str, dict[str, Any]]:
        """Return name → shape, dtype, checksum (16 hexadecimal digits), min, max, mean, norm."""
        if self._ready is not None:
            self._ready.synchronize()
        partials, sums, _ = self._stats.drain()
        numbers = finish(partials, STATISTICS)
        for name, row in self._rows.items():
            self._entries[name]["checksum"] = f"{int(sums[row]) if sums is not None else 0:016x}"
            self._entries[name] |= {key: float(numbers[key][row]) for key in STATISTICS}
        for key, found in (("samples", self._samples), ("unpadded", self._unpadded)):
            for name, rows in found.items():
                self._entries[name][key] = [f"{x:016x}" for x in rows.cpu().numpy().view(np.uint64).tolist()]
        for name, tokens in self._tokens.items():
            self._entries[name]["tokens"] = tokens.cpu().tolist()
        self._samples, self._unpadded, self._tokens, self._rows = {}, {}, {}, {}
        return self._entries


def unpadded_fingerprints(t: Tensor) -> Tensor | None:
    """Return a fingerprint of each row of whole numbers that does not depend on how far it is padded, int64 [t.shape[0]].

    t: [rows, columns]. The padding is the commonest value of the last column, where that ends at least two rows; None where the
    batch is too small or too large to look. Nothing waits for the device.
    """
    rows, columns = t.shape
    if not 2 <= rows <= MOST_PADDED_ROWS or columns < 2 or t.dtype == torch.bool:
        return None
    with torch.no_grad():
        last = t[:, -1]
        often = (last[:, None] == last).sum(1)
        padding = last.gather(0, often.argmax().view(1))
        place = torch.arange(1, columns + 1, device=t.device)
        length = torch.where(often.amax() > 1, ((t != padding) * place).amax(1), columns)
        bits = words(t.detach().reshape(-1)).reshape(rows, -1)
        kept = (place <= length[:, None]).repeat_interleave(bits.shape[1] // columns, 1)
        return (terms(bits, consecutive_keys(0, bits.shape[1], bits.device)) * kept).sum(1)
