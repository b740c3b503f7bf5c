"""Joins the packs of single ranks into the one pack of the job; the members are copied as they are."""

from __future__ import annotations

import time
from pathlib import Path

from trainprobe.config_check.pack import MANIFEST
from trainprobe.config_check.pack_members import read_members
from trainprobe.config_check.pack_reader import checked_manifest, rank_parts, read_pack
from trainprobe.config_check.pack_writer import write_zip
from trainprobe.errors import FormatError


def merge_ranks(path: Path, world_size: int | None = None, wait: float = 0.0, since: float = 0.0) -> list[int]:
    """Write `path` from the packs of the ranks beside it and return the ranks that were missing.

    world_size: number of ranks; by default what the packs say. wait: seconds to wait for ranks that have not finished.
    since: packs last written before this time (seconds since 1970) are left from another run and not taken. The packs of
    the ranks are removed only when all were complete.
    """
    deadline = time.monotonic() + wait
    while True:
        parts = {p: read_members(p) for p in rank_parts(path) if p.stat().st_mtime >= since}
        manifests = {p: checked_manifest(p, members) for p, members in parts.items()}
        done = [r for m in manifests.values() if m.get("complete") for r in m["ranks"]]
        expected = world_size or max((m["world_size"] for m in manifests.values()), default=0)
        if len(done) >= expected or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    if not parts:
        raise FormatError(f"{path}: no packs of single ranks lie beside it ({path.stem}.rank0.zip …): nothing to merge")
    ranks = [r for m in manifests.values() for r in m["ranks"]]
    twice = sorted({r for r in ranks if ranks.count(r) > 1})
    if twice:
        holding = ", ".join(p.name for p, m in manifests.items() if twice[0] in m["ranks"])
        raise FormatError(f"{path}: rank {twice[0]} stands in more than one pack ({holding}): remove the one of another run")
    missing = [r for r in range(expected) if r not in done]
    members = {n: content for part in parts.values() for n, content in part.items() if n != MANIFEST}
    heads = list(manifests.values())
    write_zip(
        path,
        members,
        {
            "world_size": expected,
            "ranks": sorted(r for head in heads for r in head["ranks"]),
            "captures": list(dict.fromkeys(c for head in heads for c in head["captures"])),
            "notes": list(dict.fromkeys(n for head in heads for n in head["notes"])),
            "micro_steps": max(head["micro_steps"] for head in heads),
            "complete": not missing,
        },
    )
    if not missing:
        read_pack(path)  # proves that it can be read before the parts go
        for part in parts:
            part.unlink()
    return missing
