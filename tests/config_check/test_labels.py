"""Labels that only a loss sees are data, and autocast is that of the first layer: real loops, each change in a pack."""

from pathlib import Path

import pytest

from tests.config_check.launch import compared, run
from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.pack_reader import read_pack

FIXTURES = Path(__file__).parent / "fixtures"


def first_line(folder, change):
    return compared(folder, change).sentence


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    made = {}

    def of(kind, *changes):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            run("labels_run.py", made[kind], kind, "base", *changes)
        return made[kind]

    return of


@pytest.mark.parametrize(("kind", "name"), [("plain", "cross_entropy.target"), ("loader", "batch.1")])
def test_labels_that_only_a_loss_sees_are_data(packs, kind, name):
    folder = packs(kind, "again", "labels", "later labels", "rate")
    assert compared(folder, "again").exit_code == 0
    assert first_line(folder, "labels") == f"the data differs from micro-step 0 on: 1 of 32 samples is replaced in {name}"
    assert first_line(folder, "later labels").startswith("the data differs from micro-step 2 on: 1 of 32 samples")
    assert first_line(folder, "rate").startswith("learning rate differs: 0.1 and 0.2")
    assert "data differ" not in first_line(folder, "rate")


def test_a_target_that_another_network_works_out_is_no_data(packs):
    folder = packs("teacher", "rate")
    assert first_line(folder, "rate").startswith("learning rate differs: 0.1 and 0.2")
    assert read_pack(folder / "base.zip").ranks[0].by_micro["dataset"][0]["tensors"].keys() == {"input"}


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["fabric", "accelerate"])
def test_autocast_and_labels_of_a_wrapped_loop_are_captured(require, packs, kind):
    require("lightning" if kind == "fabric" else "accelerate")
    folder = packs(kind, "again", "autocast", "later labels")
    assert compared(folder, "again").exit_code == 0
    assert first_line(folder, "autocast") == "autocast differs: off and bfloat16"
    expected = "the data differs from micro-step 2 on: 1 of 32 samples is replaced in batch.1"
    assert first_line(folder, "later labels") == expected


def test_a_pack_without_labels_is_compared_by_what_both_hold(packs, tmp_path):
    folder = packs("plain", "again", "labels", "later labels", "rate")
    pack = read_pack(folder / "base.zip")
    for step in pack.ranks[0].by_micro["dataset"].values():
        step["tensors"].pop("cross_entropy.target")

    found = compare_packs(pack, read_pack(folder / "again.zip"))
    assert found.exit_code == 0
    (check,) = [c for c in found.checks if c.name == "dataset"]
    assert [f.text for f in check.findings] == [
        "data beside the model's inputs (labels) was captured in cmp only: not compared"
    ]


@pytest.mark.frameworks
def test_what_an_older_version_did_not_capture_is_not_compared(require, packs):
    """`before_labels.zip` was written at aaf1a92 by `labels_run.py FOLDER fabric autocast` (data and randomness alone)."""
    require("lightning")
    new = read_pack(packs("fabric", "again", "autocast", "later labels") / "autocast.zip")
    old = read_pack(FIXTURES / "before_labels.zip")
    flags = [pack.ranks[0].single["randomness"]["flags"]["autocast"] for pack in (old, new)]
    assert flags == ["off", "bfloat16"]  # the same program, captured at two places

    for bench, cmp, new_side, old_side in ((old, new, "cmp", "bench"), (new, old, "bench", "cmp")):
        found = {c.name: c for c in compare_packs(bench, cmp).checks}
        labels = f"data beside the model's inputs (labels) was captured in {new_side} only: not compared"
        assert [(f.level, f.text) for f in found["dataset"].findings] == [("note", labels)]
        at = f"was captured by an older version before the first layer in {old_side}: not compared"
        told = [(f.level, f.text) for f in found["randomness"].findings if f.topic.startswith("flag")]
        assert told == [("note", f"autocast {at}")]


@pytest.mark.frameworks
def test_a_program_that_draws_nothing_itself_passes_though_what_it_imports_draws(require, tmp_path):
    """Lightning imports rich, which draws a number for its links; nothing seeds Python's generator."""
    require("lightning")
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        run("labels_run.py", tmp_path / side, "fabric", "base")
    a, b = (read_pack(tmp_path / side / "base.zip") for side in ("a", "b"))
    assert {c["function"] for c in a.ranks[0].single["randomness"]["calls"]} >= {"random.getrandbits"}
    found = compare_packs(a, b)
    assert (found.exit_code, found.sentence) == (0, "no difference found: everything that was captured is the same")
