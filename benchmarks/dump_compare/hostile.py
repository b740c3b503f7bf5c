"""Mutations of a dump: bytes cut off or turned, numbers, names, shapes and files changed, as a broken disk or an enemy would.

Each is compared with the dump that it was made of. The answer must be an error in one sentence, or a comparison; it must not be
"identical" where a number or a shape is another, and nothing may be run, written elsewhere, or take long.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from trainprobe.dump_compare.command import compare_rank
from trainprobe.dump_compare.pairing import pair_ranks
from trainprobe.dump_compare.verdict import judge_runs
from trainprobe.errors import ProbeError

Mutation = Callable[[Path, random.Random], bool]  # changes a rank's folder; whether a comparison must see it


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation. answer: exit code of the comparison, or the error. wrong: what must not be, or ""."""

    mutation: str
    seed: int
    answer: str
    wrong: str = ""


def _any_file(rank: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(path for path in rank.rglob("*") if path.is_file()))


def cut(rank: Path, chance: random.Random) -> bool:
    """End a file early."""
    path = _any_file(rank, chance)
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])
    return path.suffix != ".json" or path.name == "dump.json"


def turned_bytes(rank: Path, chance: random.Random) -> bool:
    """Replace some bytes of a file by chance."""
    path = _any_file(rank, chance)
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 4, 64))):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content)
    return False


def repeated(rank: Path, chance: random.Random) -> bool:
    """Write a part of a file twice."""
    path = _any_file(rank, chance)
    content = path.read_bytes()
    start = chance.randrange(len(content))
    end = min(len(content), start + chance.choice((1, 16, 4096)))
    path.write_bytes(content[:end] + content[start:])
    return False


def gone(rank: Path, chance: random.Random) -> bool:
    """Remove a file."""
    path = _any_file(rank, chance)
    path.unlink()
    return path.suffix != ".json" or path.name == "dump.json"


STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 10**400, 1e308, "", "NaN", "Infinity", "../../etc/passwd", "/etc/passwd", "x" * 10_000),
    *(
        [],
        {},
        [[]] * 3,
        {"type": "torch.Tensor"},
        {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [10**12, 10**12]},
    ),
)


def strange_value(rank: Path, chance: random.Random) -> bool:
    """Put something strange in the place of a part of dump.json, stack.json or construct.json."""
    path = chance.choice(sorted(rank.glob("*.json")))
    top = orjson.loads(path.read_bytes())
    where = list(_places(top))
    if not where:
        return False
    inside, key = chance.choice(where)
    inside[key] = chance.choice(STRANGE)
    path.write_bytes(_text(top))
    return False


def deep(rank: Path, chance: random.Random) -> bool:
    """Nest one entry's inputs thousands of times."""
    path = rank / "dump.json"
    depth = chance.choice((300, 500, 5_000, 200_000))
    text = path.read_bytes()
    at = text.find(b'"output"')
    path.write_bytes(text[:at] + b'"deep": ' + b"[" * depth + b"]" * depth + b", " + text[at:])
    return False


def other_number(rank: Path, chance: random.Random) -> bool:
    """Change a statistic of a leaf by half."""
    top = orjson.loads((rank / "dump.json").read_bytes())
    leaves = [
        leaf for leaf in _tensors(top["data"]) if isinstance(leaf.get("Norm"), float) and leaf["Norm"] > 1e-3 and "Max" in leaf
    ]
    leaf = chance.choice(leaves)
    leaf["Norm"] = leaf["Norm"] * 1.5
    leaf.pop("checksum", None)
    leaf.pop("md5", None)
    (rank / "dump.json").write_bytes(_text(top))
    return leaf.get("data_name") is None


def other_shape(rank: Path, chance: random.Random) -> bool:
    """Give a leaf one dimension more."""
    top = orjson.loads((rank / "dump.json").read_bytes())
    leaf = chance.choice([*_tensors(top["data"])])
    leaf["shape"] = [*leaf["shape"], 2]
    (rank / "dump.json").write_bytes(_text(top))
    return True


def entry_gone(rank: Path, chance: random.Random) -> bool:
    """Leave an entry out."""
    top = orjson.loads((rank / "dump.json").read_bytes())
    del top["data"][chance.choice(list(top["data"]))]
    (rank / "dump.json").write_bytes(_text(top))
    return True


def other_place(rank: Path, chance: random.Random) -> bool:
    """Let a stored tensor be looked for elsewhere."""
    top = orjson.loads((rank / "dump.json").read_bytes())
    stored = [leaf for leaf in _tensors(top["data"]) if "data_name" in leaf]
    if stored:
        chance.choice(stored)["data_name"] = chance.choice(
            ("../../secret.npy", "/etc/passwd", "a/../../b.pt", "", "x" * 300, "\x00", 7)
        )
        (rank / "dump.json").write_bytes(_text(top))
    return False


MUTATIONS: dict[str, Mutation] = {
    made.__name__: made
    for made in (cut, turned_bytes, repeated, gone, strange_value, deep, other_number, other_shape, entry_gone, other_place)
}


def mutate(dump: Path, scratch: Path, name: str, seed: int) -> Outcome:
    """Compare a dump with one mutation of it. Raises whatever is no error of the tool: that is a finding of the bench."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(dump, scratch)
    chance = random.Random(f"{name} {seed}")
    rank = next(iter(sorted(scratch.glob("step*/rank*"))))
    must_be_seen = MUTATIONS[name](rank, chance)
    try:
        pairs, missing = pair_ranks(dump, scratch)
        found = judge_runs([compare_rank(pair) for pair in pairs], missing)
    except ProbeError as error:
        text = str(error)
        return Outcome(name, seed, f"{type(error).__name__}: {text}", "the error says nothing" if len(text) < 20 else "")
    return Outcome(name, seed, str(found.code), "called identical" if must_be_seen and found.code == 0 else "")


def _text(top: Any) -> bytes:
    try:
        return orjson.dumps(top)
    except TypeError:  # a whole number beyond 64 bits
        import json

        return json.dumps(top).encode()


def _places(thing: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(thing, (dict, list)):
        for key in list(thing) if isinstance(thing, dict) else range(len(thing)):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            yield thing, key
            yield from _places(thing[key])


def _tensors(thing: Any) -> Iterator[dict[str, Any]]:
    for inside, key in _places(thing):
        leaf = inside[key]
        if isinstance(leaf, dict) and "dtype" in leaf and "shape" in leaf:
            yield leaf
