"""`SingleComparator.compare(A, B, OUT)`: where two runs' key data differ first, and a sheet for each key.

The verdict of an array: `same` (every element equal), `floor` (not farther apart than twice what a repeated run was, where one
was given), `rounding` (floating point, at most 16 units in the last place of the coarser format: what a sum in another order
gives), `differ`, `shape`, `missing` (one side does not have it) or `unreadable`. Data of a step are looked at in the order in
which they were saved, so that the first difference is the cause of those behind it.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trainprobe.errors import FormatError, UsageError
from trainprobe.rollout.folders import Address, Folder, items, read_folder
from trainprobe.rollout.pairs import Pair, pair_of
from trainprobe.rollout.sheets import write_sheets

Verdict = Literal["same", "floor", "rounding", "differ", "shape", "missing", "unreadable"]
ROUNDING = 16.0  # units in the last place
CODES = {"same": 0, "floor": 1, "rounding": 1, "unreadable": 3}  # all others: 2
_FINE = frozenset(CODES) - {"unreadable"}


@dataclass(frozen=True, slots=True)
class ArrayRow:
    """One array of both runs. pair: how they differ; None where one side is missing or cannot be read, and `note` says so."""

    address: Address
    verdict: Verdict
    pair: Pair | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class RolloutComparison:
    """All rows, in order of cause: step, order of saving, micro-batch, rank."""

    a: Path
    b: Path
    rows: list[ArrayRow] = field(repr=False)
    ordered: bool = True  # whether the order of saving was known

    @property
    def first(self) -> ArrayRow | None:
        """The first array that differs by more than noise, or None."""
        return next((row for row in self.rows if row.verdict not in _FINE), None)

    @property
    def code(self) -> int:
        """Exit code: 0 the same, 1 within noise, 2 they differ, 3 what could be read is the same, and that is not all."""
        codes = {CODES.get(row.verdict, 2) for row in self.rows}
        return 2 if 2 in codes else max(codes) if self._elements or 3 in codes else 3

    @property
    def _elements(self) -> bool:
        return any(math.prod(row.pair.shape1) for row in self.rows if row.pair is not None)

    @property
    def sentence(self) -> str:
        """The verdict in a sentence, with the first place where the runs part."""
        count = Counter(row.verdict for row in self.rows)
        whole = f"{len(self.rows)} arrays of {len({row.address.key for row in self.rows})} keys"
        first = self.first
        if first is None and not self._elements:
            return f"Nothing was compared: {whole} hold no element."
        if first is None:
            shares = [f"{count['same']} equal in every element"] if count["same"] else []
            shares += [f"{count[name]} within {text}" for name, text in _NOISE.items() if count[name]]
            return f"The key data are the same: {whole}, {', '.join(shares)}."
        before = [row.address.key for row in self.rows[: self.rows.index(first)] if row.address.step == first.address.step]
        equal = [key for key in dict.fromkeys(before) if key != first.address.key]
        same_arrays = f" In that step {_listed(equal)} {'is' if len(equal) == 1 else 'are'} the same." if equal else ""
        order = "" if self.ordered else " The order of saving is not known: keys of a step were taken in alphabetical order."
        others = sum(count[name] for name in count if name not in _FINE)
        if self.code == 3:
            unread = f"{count['unreadable']} of {whole} cannot be read"
            return f"{unread}, the others are the same; the first is {first.address}: {first.note}"
        return f"{first.address} differs first: {_described(first)}.{same_arrays} {others} of {whole} differ.{order}"


_NOISE = {"floor": "twice the noise of the repeated run", "rounding": f"{ROUNDING:g} units in the last place"}


class SingleComparator:
    """Compares the key data of two runs, as `SingleSave` and mindstudio-probe write them."""

    @staticmethod
    def compare(
        dir1: str | os.PathLike[str],
        dir2: str | os.PathLike[str],
        output_path: str | os.PathLike[str] = "rollout_compare",
        num_processes: int = 8,
        *,
        floor: str | os.PathLike[str] | None = None,
    ) -> RolloutComparison:
        """Compare two folders; write a sheet for each key and `verdict.json` to `output_path`, and return the comparison.

        floor: folder of a repeated run of one side: what differs by no more than twice its distance from `dir1` is noise.
        num_processes: how many arrays are compared at a time. Raises FormatError for a folder without key data, UsageError
        for fewer than one process, MissingExtra without openpyxl.
        """
        if num_processes < 1:
            raise UsageError(f"num_processes={num_processes}: give 1 or more")
        found = compare_folders(Path(dir1), Path(dir2), None if floor is None else Path(floor), num_processes)
        output = Path(output_path)
        output.mkdir(parents=True, exist_ok=True)
        write_sheets(((row.address, row.pair, row.verdict, row.note) for row in found.rows), output)
        (output / "verdict.json").write_text(json.dumps(as_json(found), indent=1, ensure_ascii=False), encoding="utf-8")
        return found


def compare_folders(a: Path, b: Path, floor: Path | None = None, workers: int = 8) -> RolloutComparison:
    """Compare the arrays of two folders, `workers` at a time."""
    left, right = read_folder(a), read_folder(b)
    order = left.order | right.order
    addresses = sorted(left.arrays.keys() | right.arrays.keys(), key=partial(_by_cause, order))
    with ThreadPoolExecutor(min(workers, os.cpu_count() or 1)) as pool:
        noise = _noise(left, read_folder(floor), pool) if floor is not None else {}
        rows = list(pool.map(partial(_row, left, right, noise), addresses))
    return RolloutComparison(a, b, rows, ordered=bool(order))


def as_json(found: RolloutComparison) -> dict[str, Any]:
    """Return a comparison as JSON values: the verdict, the first place, and each array that is not the same."""
    rows = [
        {**asdict(row.address), "verdict": row.verdict, "note": row.note, **({} if row.pair is None else asdict(row.pair))}
        for row in found.rows
        if row.verdict != "same"
    ]
    return {"code": found.code, "sentence": found.sentence, "arrays": len(found.rows), "not the same": rows}


def _by_cause(order: Mapping[str, int], address: Address) -> tuple[Any, ...]:
    path = [(isinstance(part, str), part) for part in items(address)]
    return address.step, order.get(address.key, len(order)), address.key, address.micro, address.rank, path


def _noise(left: Folder, repeated: Folder, pool: ThreadPoolExecutor) -> dict[str, float]:
    """Return key → the largest absolute error between a run and its repetition."""
    noise: dict[str, float] = {}
    shared = [address for address in left.arrays if address in repeated.arrays]
    for address, row in zip(shared, pool.map(partial(_row, left, repeated, {}), shared), strict=True):
        if row.pair is not None and row.pair.max_abs is not None and row.verdict != "shape":
            noise[address.key] = max(noise.get(address.key, 0.0), row.pair.max_abs)
    return noise


def _row(left: Folder, right: Folder, noise: Mapping[str, float], address: Address) -> ArrayRow:
    for side, other in ((left, right), (right, left)):
        if address not in side.arrays:
            return ArrayRow(address, "missing", note=f"only {other.root} has it")
    try:
        pair = pair_of(left.load(address), right.load(address), left.formats.get(address), right.formats.get(address))
    except FormatError as error:
        return ArrayRow(address, "unreadable", note=str(error))
    return ArrayRow(address, _verdict(pair, noise.get(address.key)), pair)


def _verdict(pair: Pair, noise: float | None) -> Verdict:
    if pair.shape1 != pair.shape2:
        return "shape"
    if pair.first_mismatch is None:
        return "same"
    if pair.max_abs is None or pair.max_ulp is None:
        return "differ"
    if noise is not None:
        return "floor" if pair.max_abs <= 2 * noise else "differ"
    return "rounding" if pair.floating and pair.max_ulp <= ROUNDING else "differ"


def _described(row: ArrayRow) -> str:
    pair = row.pair
    if pair is None:
        return row.note
    if row.verdict == "shape":
        return f"shapes {list(pair.shape1)} and {list(pair.shape2)}"
    far = "" if pair.max_relative is None else f", largest relative error {pair.max_relative:.3g}"
    at = f"element {pair.first_mismatch} of {list(pair.shape1)} is {pair.first_values[0]} and {pair.first_values[1]}"
    return f"{at}; {pair.equal:.4g} % of the elements are equal{far}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
