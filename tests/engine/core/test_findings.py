"""One entry a cause: findings of several steps and ranks are joined, counted, written and read back, and fit their schema."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import orjson

from trainprobe.cli import main
from trainprobe.engine.core.findings import counted, merged, place_in_words, schema, schema_text, with_last_counts
from trainprobe.engine.core.records import Finding, Place, Site
from trainprobe.engine.storage.dumps.findings_file import finding_of, read_findings
from trainprobe.monitor.findings import all_findings, causes, in_order

DOCS = Path(__file__).parents[3] / "docs"
GRAD = Site("parameter", "layers.0.weight", "grad")


def at(step, rank=0, rule="replicas", site=GRAD, severity="error", **more):
    return Finding(rule, severity, f"seen on rank {rank} at step {step}", step, Place(rank, 4), site, **more)


def test_the_same_violation_on_other_ranks_and_later_steps_is_one_entry_with_its_counts():
    rank0 = counted(counted(at(8), 12), 93)
    (joined,) = merged([at(8, 3), at(8, 1), rank0, at(12, 2)])
    assert (joined.message, joined.step, joined.ranks, joined.count, joined.last_step) == (
        "seen on rank 0 at step 8",
        8,
        (0, 1, 2, 3),
        3,
        93,
    )
    assert place_in_words(joined) == "step 8, ranks 0–3, also at 2 later steps until step 93"


def test_other_places_severities_and_rules_are_other_causes():
    found = [
        at(8),
        at(8, site=replace(GRAD, name="layers.1.weight")),
        at(8, severity="warning"),
        at(8, rule="movement"),
        at(8, expected="zero"),
    ]
    assert merged(found) == found


def test_without_a_place_the_words_without_their_numbers_tell_causes_apart():
    words = ("ranks 0 and 1 got equal batches", "ranks 2 and 3 got equal batches", "the batch of step 7 came again")
    found = [Finding("distinct_data", "error", text, 7) for text in words]
    assert [f.message for f in merged(found)] == [words[0], words[2]]


def test_names_of_all_are_kept():
    (joined,) = merged([at(8, names=("a", "b")), at(8, 1, names=("b", "c"))])
    assert joined.names == ("a", "b", "c")


def test_a_later_line_with_a_new_count_stands_for_the_earlier_one():
    first, other = at(8), at(8, rule="movement")
    second = counted(first, 10)
    assert with_last_counts([first, other, second, counted(second, 12), at(40)]) == [counted(second, 12), other, at(40)]


def test_causes_come_before_consequences_by_step_and_then_by_where_in_the_step_they_arise():
    output = Site("module", "layers.0", "output")
    told = [
        Finding("plan", "warning", "step 500 never came"),
        at(9, rule="spike", site=output),
        at(8, rule="update_ratio", severity="warning", site=replace(GRAD, slot="update")),
        at(8, rule="movement", site=replace(GRAD, slot="value")),
        at(8, rule="spike", severity="warning", site=output),
        at(8, rule="ownership", site=replace(GRAD, slot="value")),
        at(8, rule="spike", site=Site("scalar", "grad_norm", "value"), severity="warning"),
        at(8, rule="nonfinite", rank=1),
        at(8, rule="nonfinite"),
    ]
    assert [(f.step, f.rule, f.place.rank if f.place else None) for f in in_order(told)] == [
        (8, "ownership", 0),
        (8, "spike", 0),
        (8, "nonfinite", 0),
        (8, "nonfinite", 1),
        (8, "spike", 0),
        (8, "movement", 0),
        (8, "update_ratio", 0),
        (9, "spike", 0),
        (None, "plan", None),
    ]


def test_a_nan_that_came_with_the_exchange_of_gradients_is_that_of_the_rank_where_it_was_born():
    born = at(8, 1, "nonfinite", Site("module", "layers.2", "output"))
    arrived = [at(8, rank, "nonfinite", replace(GRAD, name=f"layers.{rank}.weight")) for rank in (0, 2)]
    later = at(20, 0, "nonfinite", replace(GRAD, name="layers.5.weight"))
    (first, second) = causes([*arrived, later, born])
    assert (first.message, first.ranks) == (f"{born.message}; rank 1 made it, and it reached ranks 0, 2", (0, 1, 2))
    assert second == later
    own = at(8, 0, "nonfinite", Site("module", "layers.0", "output"))
    assert len(causes([own, born])) == 2  # each rank has one of its own


def test_what_was_recorded_and_is_found_again_is_one_entry():
    recorded = [at(8, 0), at(8, 1), at(9, rule="ownership")]
    now = [at(8, 0), at(8, 1), at(30, rule="spike")]
    assert [
        (told.finding.rule, told.finding.ranks, told.finding.count, told.origin) for told in all_findings(recorded, now)
    ] == [
        ("replicas", (0, 1), 1, "both"),
        ("ownership", (), 1, "recorded"),
        ("spike", (), 1, "judged"),
    ]


def test_a_file_of_before_there_were_counts_still_reads(tmp_path):
    old = {k: v for k, v in asdict(at(8)).items() if k not in ("names", "count", "last_step", "ranks")}
    (tmp_path / "findings.jsonl").write_bytes(orjson.dumps(old) + b"\n")
    assert read_findings(tmp_path) == [at(8)]


def test_a_finding_reads_back_as_it_was_written():
    finding = replace(counted(at(8, measured=float(2), expected="one", names=("a",)), 9), ranks=(0, 1))
    assert finding_of(orjson.loads(orjson.dumps(asdict(finding)))) == finding


def test_the_schema_in_docs_is_that_of_the_code(capsys):
    text = (DOCS / "finding.schema.json").read_text(encoding="utf-8")
    assert json.loads(text) == schema(), "run `trainprobe judge --schema > docs/finding.schema.json`"
    assert main(["judge", "--schema"]) == 0
    assert capsys.readouterr().out == schema_text()


def test_a_finding_fits_its_schema_and_one_with_a_wrong_field_does_not(require):
    validator = require("jsonschema").Draft202012Validator(schema())
    line = json.loads(orjson.dumps(asdict(at(8, measured=float("nan"), names=("a",)))))
    assert validator.is_valid(line)
    for field, wrong in (("severity", "grave"), ("count", "two"), ("names", [1]), ("place", 3), ("rule", None)):
        assert not validator.is_valid({**line, field: wrong})
