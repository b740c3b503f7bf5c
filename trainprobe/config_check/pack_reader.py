"""Reads packs that anybody may have made: nothing in them is trusted.

A checksum that does not fit, a newer format, a member that is missing: each is refused with a sentence.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from trainprobe.config_check.msprobe_pack import is_msprobe, read_msprobe
from trainprobe.config_check.pack import BY_MICRO_STEP, CAPTURES, FORMAT, MANIFEST, VERSION, Pack, RankPack
from trainprobe.config_check.pack_members import parse_json, read_members
from trainprobe.engine.core.records import MOST_RANKS
from trainprobe.errors import FormatError

_MEMBER = re.compile(r"rank(\d{1,6})/(?:(dataset|weights)/micro(\d{1,9})|([a-z]+))\.json")


def read_pack(path: str | Path) -> Pack:
    """Return the pack in a zip, ours or that of mindstudio-probe.

    Raises FormatError on what is not a pack or is damaged, UnsafeFile on what was made to do harm. Where the zip does not
    exist but the zips of single ranks lie beside it, they are merged in memory.
    """
    path = Path(path)
    if not path.exists():
        parts = rank_parts(path)
        if parts:
            return merged([read_pack(part) for part in parts], str(path))
        raise FormatError(f"{path}: there is no such pack (looked in {path.absolute().parent})")
    members = read_members(path)
    if MANIFEST not in members:
        if is_msprobe(members):
            return read_msprobe(str(path), members)
        raise FormatError(f"{path}: has no {MANIFEST}, so it is not a pack; `trainprobe config-check collect` makes one")
    return _assemble(path, members, checked_manifest(path, members))


def rank_parts(path: Path) -> list[Path]:
    """Return the packs of single ranks that lie beside where the merged pack would be, by rank."""
    found = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(path.suffix or '.zip')}")
    here = [(match, p) for p in path.parent.glob("*") if (match := found.fullmatch(p.name))] if path.parent.is_dir() else []
    return [p for _, p in sorted(here, key=lambda pair: int(pair[0][1]))]


def checked_manifest(path: Path, members: dict[str, bytes]) -> dict[str, Any]:
    """Return the manifest after holding format, version and every checksum against it."""
    manifest = parse_json(path, MANIFEST, members[MANIFEST])
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FormatError(f"{path}: {MANIFEST} does not say format {FORMAT!r}: it is another tool's file")
    version = manifest.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{path}: the format version {version!r} in {MANIFEST} is not a number")
    if version > VERSION:
        raise FormatError(f"{path}: has format version {version} and this trainprobe reads up to {VERSION}: update trainprobe")
    ranks, world_size = manifest.setdefault("ranks", []), manifest.setdefault("world_size", 1)
    if not (_counts([world_size]) and isinstance(ranks, list) and _counts(ranks)):
        raise FormatError(
            f"{path}: {MANIFEST} holds ranks {str(ranks)[:50]} of {str(world_size)[:50]}: it was edited or damaged"
        )
    for name in ("captures", "notes"):
        manifest[name] = [str(one) for one in manifest.get(name) or () if isinstance(one, str)]
    manifest["micro_steps"] = manifest.get("micro_steps") if _counts([manifest.get("micro_steps")]) else 0
    _check_members(path, members, manifest.get("members"))
    return manifest


def _check_members(path: Path, members: dict[str, bytes], listed: Any) -> None:
    """Hold the content of the zip against the list of the manifest."""
    if not isinstance(listed, dict):
        raise FormatError(f"{path}: {MANIFEST} lists no members: it was edited or damaged")
    for name in sorted(set(listed) | (set(members) - {MANIFEST})):
        if name not in members:
            raise FormatError(f"{path}: {name!r} is listed in {MANIFEST} and absent: the pack is damaged")
        if name not in listed:
            raise FormatError(f"{path}: {name!r} is in the zip and not listed in {MANIFEST}: it was added afterwards")
        recorded = listed[name].get("sha256") if isinstance(listed[name], dict) else None
        if hashlib.sha256(members[name]).hexdigest() != recorded:
            raise FormatError(f"{path}: {name!r} does not fit its sha256 in {MANIFEST}: it was edited or damaged")


def _counts(numbers: list[Any]) -> bool:
    """Return whether all are whole numbers that a job can have of anything."""
    return all(type(number) is int and 0 <= number <= MOST_RANKS for number in numbers)


def _assemble(path: Path, members: dict[str, bytes], manifest: dict[str, Any]) -> Pack:
    single: dict[int, dict[str, Any]] = {}
    by_micro: dict[int, dict[str, dict[int, Any]]] = {}
    for name in members:
        if name == MANIFEST:
            continue
        match = _MEMBER.fullmatch(name)
        if match is None or (match[4] and match[4] not in CAPTURES):
            raise FormatError(f"{path}: {name!r} is no member of a pack of version {VERSION}")
        content = parse_json(path, name, members[name])
        if not isinstance(content, dict):
            raise FormatError(f"{path}: {name!r} holds a {type(content).__name__} where an object belongs")
        rank = int(match[1])
        single.setdefault(rank, {})
        if match[2]:
            by_micro.setdefault(rank, {}).setdefault(match[2], {})[int(match[3])] = content
        else:
            single[rank][match[4]] = content
    ranks = {r: RankPack(r, single[r], by_micro.get(r, {})) for r in sorted(single)}
    world_size = manifest.get("world_size", 1)
    if not ranks or not isinstance(world_size, int):
        raise FormatError(f"{path}: holds no capture of any rank")
    captures = tuple(c for c in manifest.get("captures", CAPTURES) if c in (*CAPTURES, *BY_MICRO_STEP))
    return Pack(
        str(path),
        ranks,
        max(world_size, 1),
        bool(manifest.get("complete", False)),
        captures,
        int(manifest.get("micro_steps") or 0),
        tuple(str(note) for note in manifest.get("notes", [])),
    )


def merged(packs: list[Pack], path: str) -> Pack:
    """Return one pack of the packs of several ranks of one job."""
    ranks: dict[int, RankPack] = {}
    for pack in packs:
        for rank, content in pack.ranks.items():
            if rank in ranks:
                raise FormatError(f"{pack.path}: holds rank {rank}, and so does another of the packs to merge")
            ranks[rank] = content
    world_size = max(pack.world_size for pack in packs)
    return Pack(
        path,
        dict(sorted(ranks.items())),
        world_size,
        all(pack.complete for pack in packs) and len(ranks) == world_size,
        tuple(dict.fromkeys(c for pack in packs for c in pack.captures)),
        max(pack.micro_steps for pack in packs),
        tuple(dict.fromkeys(note for pack in packs for note in pack.notes)),
    )
