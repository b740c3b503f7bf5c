"""How a plan's file is read: strictly, and with the place of every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainprobe.engine.plan.file import LARGEST_FILE, read_plan_file
from trainprobe.engine.plan.loading import load_plan
from trainprobe.errors import PlanError


def write(folder: Path, text: str | bytes, name: str = "plan.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "name"), [("level: L1\nstep: [1, 2-3]\n", "p.yaml"), ('{"level": "L1", "step": [1, "2-3"]}', "p.json")]
)
def test_yaml_and_json_make_the_same_plan(tmp_path: Path, text: str, name: str) -> None:
    plan = load_plan(write(tmp_path, text, name))
    assert (plan.level, plan.step) == ("L1", (1, "2-3"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("true", True),
        ("0x10", 16),
        ("010", 10),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-7", -7),
        ("~", None),
        ("10-20", "10-20"),
        ("'3'", "3"),
    ],
)
def test_a_scalar_of_yaml_becomes_what_it_looks_like(tmp_path: Path, text: str, value: object) -> None:
    assert read_plan_file(write(tmp_path, f"key: {text}\n")) == {"key": value}


def test_level_off_needs_no_quotes(tmp_path: Path) -> None:
    assert load_plan(write(tmp_path, "level: off\n")).level == "off"


def test_an_empty_file_is_the_default_plan(tmp_path: Path) -> None:
    assert load_plan(write(tmp_path, "# nothing yet\n")) == load_plan()


def test_anchors_and_merges_are_followed(tmp_path: Path) -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\n"
    assert read_plan_file(write(tmp_path, text))["b"] == {"x": 1, "y": 2}


BAD: list[tuple[str | bytes, str, str]] = [
    ("level: L0\nlevel: L1\n", "plan.yaml", "plan.yaml: line 2: the key 'level' stands twice in one section"),
    ('{"level": "L0", "level": "L1"}', "plan.json", "plan.json: the key 'level' stands twice in one section"),
    ("details:\n  - {match: a, match: b}\n", "plan.yaml", "line 2: the key 'match' stands twice"),
    ("level: [\n", "plan.yaml", "line 2, column 1: is not YAML"),
    ('{"level": }', "plan.json", "line 1, column 11: is not JSON"),
    ('{"low": NaN}', "plan.json", "NaN is not a JSON number"),
    ("- a\n", "plan.yaml", "this file holds a list"),
    ("? [a, b]\n: 1\n", "plan.yaml", "a key must be one word"),
    ("key: !!python/object/apply:os.system ['true']\n", "plan.yaml", "is not YAML: could not determine a constructor"),
    ("a: *b\n", "plan.yaml", "is not YAML: found undefined alias"),
    ("a: &a [*a]\n", "plan.yaml", "its anchors expand to more than"),
    ("[" * 100_000, "plan.json", "nested too deeply"),
    ("key: " + "[" * 3000 + "]" * 3000, "plan.yaml", "nested too deeply"),
    (b"level: \xff\n", "plan.yaml", "is not UTF-8 text (byte 7)"),
    (b"level: \x00\n", "plan.yaml", "is not YAML"),
    (b"#" * (LARGEST_FILE + 1), "plan.yaml", "is larger than 1 MiB"),
    ("level: L0\n", "plan.toml", "a plan is a .yaml, .yml or .json file, and this one ends in '.toml'"),
    ("levle: L0\n", "plan.yaml", "plan.yaml: unknown key 'levle' — did you mean 'level'?"),
    ("level: L9\n", "plan.yaml", "plan.yaml: level: 'L9' cannot be used"),
    ("key: " + "9" * 5000, "plan.json", "is not JSON"),
    ('{"key": ' + "9" * 5000 + "}", "plan.json", "is not JSON"),
    ("key: " + "9" * 5000, "plan.yaml", "is not YAML"),
]


@pytest.mark.parametrize(("text", "name", "sentence"), BAD, ids=[sentence for _, _, sentence in BAD])
def test_a_file_that_is_no_plan_is_refused_with_the_place(tmp_path: Path, text: str | bytes, name: str, sentence: str) -> None:
    path = write(tmp_path, text, name)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_anchors_that_multiply_are_refused_before_they_are_expanded(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(PlanError, match="its anchors expand to more than"):
        load_plan(write(tmp_path, "\n".join(lines)))


def test_a_missing_file_is_told_with_the_folder_that_was_looked_in(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nix.yaml: there is no such plan file \(looked in "):
        load_plan(tmp_path / "nix.yaml")


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").mkdir()
    with pytest.raises(PlanError, match="is a folder, and a plan is a file"):
        load_plan(tmp_path / "p.yaml")
