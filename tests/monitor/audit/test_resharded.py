"""What some ranks saved and others loaded, cut in another way: quiet where it came back, and right about what did not."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.launch import launch
from tests.monitor.audit.train_resharded import LOST, SAVED, SWAPPED
from trainprobe.engine.arrays.torch_checksum import share_of
from trainprobe.engine.capture.saved_shards import shards_of
from trainprobe.engine.core.sources import Part
from trainprobe.engine.geometry.shards import SavedShard, Shard
from trainprobe.engine.stats.checksum import fingerprint, shard_fingerprint
from trainprobe.monitor.audit.resharded import logical

SCRIPT = Path(__file__).with_name("train_resharded.py")
SAVES = ("fsdp", "ddp")
FAULTS = {
    1: {"fsdp-plain": "healthy swapped moment unshared schedule data", "ddp-plain": "healthy data"},
    2: {
        "fsdp-ddp": "healthy swapped moment unshared apart",
        "fsdp-columns": "healthy swapped schedule",
        "ddp-fsdp": "healthy swapped moment data",
        "fsdp-fsdp": "healthy",
    },
    4: {"fsdp-fsdp": "healthy swapped moment schedule data", "ddp-ddp": "healthy moment schedule data"},
}
CASES = {
    ranks: [f"{layouts}-{fault}" for layouts, faults in table.items() for fault in faults.split()]
    for ranks, table in FAULTS.items()
}
WHOLE = "ddp-ddp"  # each rank holds all that it held when it saved, and judges that at once
COMPARED = 10  # the first step at which the ranks compare anything


@functools.cache
def found() -> dict[tuple[int, str], list[list]]:
    """Save with two ranks, load with others; return (ranks, case) → what rank 0 found, after a look at the others."""
    folder = Path(tempfile.mkdtemp(prefix="trainprobe_relaid_"))
    launch(SCRIPT, 2, str(folder), "save", *SAVES, timeout=300)
    out: dict[tuple[int, str], list[list]] = {}
    for ranks, cases in CASES.items():
        launch(SCRIPT, ranks, str(folder), "load", *cases, timeout=300)
        for case in cases:
            told = [json.loads((folder / f"{case}.{ranks}.{rank}.json").read_text()) for rank in range(ranks)]
            out[ranks, case] = told[0]
            if not case.startswith(WHOLE):  # rank 0 speaks for all
                assert [f for others in told[1:] for f in others if f[0] == "saved_and_loaded"] == []
    return out


def cases(*faults: str) -> list[tuple[int, str]]:
    return [(ranks, case) for ranks, names in CASES.items() for case in names if case.endswith(faults)]


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", cases("healthy"))
def test_what_came_back_raises_no_alarm(case):
    assert found()[case] == []


@pytest.mark.parametrize("case", cases("swapped", "moment"))
def test_what_did_not_come_back_is_named(case):
    told = [finding for finding in found()[case] if finding[0] == "saved_and_loaded"]
    ((_, severity, step, name, slot, message),) = told
    expected = (SWAPPED, "value") if case[1].endswith("swapped") else (LOST, "step")
    own = case[0] == 1 or case[1].startswith(WHOLE)
    assert (severity, step, name, slot) == ("error", SAVED + 1 if own else COMPARED, *expected)
    assert f"as it was saved at step {SAVED}" in message
    assert case[1].startswith(WHOLE) or f" by 2 ranks and loaded before step {SAVED + 1}" in message
    if case in ((2, "fsdp-ddp-swapped"), (1, "fsdp-plain-swapped")):
        assert "it holds what was value of 2.weight" in message


@pytest.mark.parametrize("case", cases("schedule"))
def test_a_schedule_that_begins_again_in_another_layout_is_told_once(case):
    told = [finding for finding in found()[case] if finding[0] == "resumed"]
    ((_, severity, _, name, _, message),) = told
    assert (severity, name) == ("error", "lr")
    assert f"StepLR is at 0 after the load, and was at {SAVED + 1} when it was saved at step {SAVED}" in message


@pytest.mark.parametrize("case", cases("data"))
def test_data_that_begins_again_on_other_ranks_is_told_once(case):
    told = [finding for finding in found()[case] if finding[0] == "resumed"]
    ((_, severity, step, name, _, message),) = told
    assert (severity, step, name) == ("warning", SAVED + 1 if case[0] == 1 else COMPARED, "batch")
    assert f"step {SAVED + 1} after the load trains on what step 0 trained on" in message


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ((2, "fsdp-ddp-unshared"), "have all ranks write to one folder that they share"),
        ((1, "fsdp-plain-unshared"), "Of the 2 ranks that saved at step 3, 1 left their fingerprints under this output"),
        ((2, "fsdp-ddp-apart"), "set `ranks: true` in the plan's `audit`"),
    ],
)
def test_what_cannot_be_judged_is_said_once(case, why):
    ((rule, severity, _, name, _, message),) = found()[case]
    assert (rule, severity, name) == ("saved_and_loaded", "warning", None)
    assert "nothing of it was judged" in message and why in message


RECTANGLES = [
    Shard((0, 0), (3, 7), (6, 7)),
    Shard((2, 3), (4, 4), (6, 7)),
    Shard((0, 6), (6, 1), (6, 7)),
    Shard((5,), (11,), (42,)),
    Shard((3,), (8,), (12,), within=Shard((1, 2), (4, 3), (6, 7))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("shard", RECTANGLES, ids=str)
def test_the_share_of_a_piece_is_that_of_the_reference(shard, dtype):
    whole = torch.randn(6, 7, dtype=dtype, generator=torch.Generator().manual_seed(1))
    places = torch.arange(42).view(6, 7)
    outer = shard.within or shard
    rows, columns = (
        (slice(o, o + s) for o, s in zip(outer.offset, outer.shape, strict=True)) if len(outer.offset) == 2 else ((), ())
    )
    inner = places[rows, columns] if len(outer.offset) == 2 else places
    if len(shard.offset) == 1:
        inner = inner.reshape(-1)[shard.offset[0] : shard.offset[0] + shard.shape[0]]
    piece = whole.reshape(-1)[inner.reshape(-1)]
    bits = piece.view(torch.int16).numpy() if dtype == torch.bfloat16 else piece.numpy()
    at = inner.reshape(-1).numpy().astype(np.uint64)
    assert share_of(piece.view(shard.shape), shard).item() % (1 << 64) == fingerprint(bits, at)


def test_pieces_of_any_cut_make_up_one_fingerprint_and_others_make_none():
    whole = torch.arange(42, dtype=torch.float32).view(6, 7)
    cuts = [
        [Shard((0, 0), (4, 7), (6, 7)), Shard((4, 0), (2, 7), (6, 7))],
        [Shard((0, 0), (6, 3), (6, 7)), Shard((0, 3), (6, 4), (6, 7))],
        [Shard((0,), (20,), (42,)), Shard((20,), (22,), (42,))],
    ]
    for shards in cuts:
        parts = []
        for shard in shards:
            flat = len(shard.offset) == 1
            t = whole.reshape(-1)[shard.offset[0] :][: shard.shape[0]] if flat else whole
            t = t if flat else t[tuple(slice(o, o + s) for o, s in zip(shard.offset, shard.shape, strict=True))]
            parts.append(Part(f"on {shard.offset}", "value", t, shard))
        pieces = list(shards_of(parts).values())
        assert logical(pieces) == logical([*pieces, pieces[0]]) == fingerprint(whole.numpy())
        assert logical(pieces[:1]) is None
        first = pieces[0]
        assert logical([*pieces, SavedShard(first.place, first.count, first.whole, first.share ^ 1)]) is None
    rows = whole[:4].numpy()
    assert shards_of([Part("w", "value", whole[:4], cuts[0][0])])["w", "value"].share == shard_fingerprint(rows, (0, 0), (6, 7))
    assert shards_of([Part("w", "value", whole, Shard((0, 0), (6, 7), (6, 7)))]) == {}
