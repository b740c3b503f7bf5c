"""What a table says of values that several ranks hold is read in that way alone, and what is wrong in it is named."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.dump_compare.test_other_layouts import _Known
from trainprobe.dump_compare.layouts.joined import JoinedSide, RankPart
from trainprobe.dump_compare.layouts.split_table import splits
from trainprobe.dump_compare.layouts.splits import joins
from trainprobe.engine.core.records import Value
from trainprobe.errors import CompareError, FormatError


class _Stored(_Known):
    def held(self, value: Value, shape: tuple[int, ...]) -> np.ndarray:
        return self.elements


def parts(arrays: list[np.ndarray]) -> list[RankPart]:
    return [RankPart(_Stored(a), Value(0, "torch.float64", a.shape), i, (0,), i) for i, a in enumerate(arrays)]


def table(tmp_path, text: str):
    path = tmp_path / "splits.yaml"
    path.write_text(text)
    return splits(path)


def test_parts_are_put_along_the_dimension_that_a_rule_names(tmp_path):
    rule = table(tmp_path, "rules: [{module: 'a.*', slot: output, tp: 1}]").find("a.b", "Linear", "output")
    whole = np.arange(16.0).reshape(4, 4)
    made = joins(parts([whole]), parts(np.split(whole, 2, 1)), "activation", (None, rule))
    assert made is not None
    side = JoinedSide("B", [made[1].parts[0].side])
    assert np.array_equal(side.array(side.add(made[1])), whole)


def test_terms_of_a_rule_are_added(tmp_path):
    rule = table(tmp_path, "rules: [{class: Mixer, tp: sum}]").find("a.b", "Mixer", "output")
    terms = [np.ones((2, 3)), np.full((2, 3), 2.0)]
    made = joins(parts([terms[0] + terms[1]]), parts(terms), "activation", (None, rule))
    assert made is not None
    side = JoinedSide("B", [made[1].parts[0].side])
    assert np.array_equal(side.array(side.add(made[1])), np.full((2, 3), 3.0))


def test_a_rule_that_cannot_be_is_named(tmp_path):
    rule = table(tmp_path, "rules: [{module: a.b, tp: copy}]").find("a.b", "Linear", "output")
    whole = np.arange(16.0).reshape(4, 4)
    with pytest.raises(CompareError, match=r"splits\.yaml, rule 1 does not fit: the ranks of A hold 16 .* of B 16"):
        joins(parts([whole]), parts(np.split(whole, 2, 1)), "activation", (None, rule))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules: [{module: a, tpp: sum}]", "rule 1 has 'tpp' — did you mean 'tp'"),
        ("rules: [{module: a, tp: add}]", "tp is 'add'; write copy, sum, split"),
        ("rules: [{slot: output, tp: sum}]", "needs `module` or `class`"),
        ("splits: []", "needs a list of `rules`"),
        ("rules: [", "is no YAML"),
    ],
)
def test_a_faulty_table_says_what_is_wrong(tmp_path, text, said):
    with pytest.raises(FormatError, match=re.escape(said)):
        table(tmp_path, text)
