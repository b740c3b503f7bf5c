"""Which numbers and names a selection means, against an oracle that tries everything."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainprobe.engine.plan.selection import Names, parse_names, parse_steps

HORIZON = 80
small = st.integers(0, 40)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[int | str, set[int]]:
    """A piece as a person writes it, and the numbers below HORIZON that it means, listed one by one."""
    first, length, stride = draw(small), draw(small), draw(st.integers(1, 12))
    last = first + length
    kind = draw(st.sampled_from(["one", "text", "range", "open", "every", "every from", "every from to", "every to", "all"]))
    table: dict[str, tuple[int | str, set[int]]] = {
        "one": (first, {first}),
        "text": (f" {first} ", {first}),
        "range": (f"{first}-{last}", {n for n in range(HORIZON) if first <= n <= last}),
        "open": (f"{first}-", {n for n in range(HORIZON) if n >= first}),
        "every": (f"every {stride}", {n for n in range(HORIZON) if n % stride == 0}),
        "every from": (f"every {stride} from {first}", set(range(first, HORIZON, stride))),
        "every from to": (f"every {stride} from {first} to {last}", set(range(first, min(last + 1, HORIZON), stride))),
        "every to": (f"every {stride} to {last}", {n for n in range(min(last + 1, HORIZON)) if n % stride == 0}),
        "all": ("all", set(range(HORIZON))),
    }
    return table[kind]


@given(st.lists(pieces(), min_size=1, max_size=4))
def test_a_selection_holds_exactly_the_union_of_its_pieces(several: list[tuple[int | str, set[int]]]) -> None:
    steps = parse_steps([text for text, _ in several])
    assert {n for n in range(HORIZON) if n in steps} == set().union(*(numbers for _, numbers in several))


@given(st.lists(pieces(), min_size=1, max_size=4))
def test_the_last_step_is_the_largest_one_or_none_when_there_is_no_end(several: list[tuple[int | str, set[int]]]) -> None:
    steps = parse_steps([text for text, _ in several])
    endless = any(n in steps for n in range(10_000, 10_100))
    assert steps.last() == (None if endless else max(set().union(*(numbers for _, numbers in several))))


@given(st.lists(pieces(), min_size=1, max_size=4), small, small)
def test_a_piece_is_pending_when_none_of_its_steps_was_seen(
    several: list[tuple[int | str, set[int]]], low: int, more: int
) -> None:
    high = low + min(more, HORIZON - low - 1)
    steps = parse_steps([text for text, _ in several])
    expected = [str(text).strip() for text, numbers in several if not numbers & set(range(low, high + 1))]
    assert list(steps.pending(low, high)) == expected


@given(st.lists(pieces(), min_size=1, max_size=4))
def test_one_text_with_commas_is_the_same_as_a_list(several: list[tuple[int | str, set[int]]]) -> None:
    texts = [str(text) for text, _ in several]
    assert [n in parse_steps(",".join(texts)) for n in range(HORIZON)] == [n in parse_steps(texts) for n in range(HORIZON)]


@pytest.mark.parametrize(
    "piece", [True, 1.5, None, -1, "-1", "", "5-3", "every 0", "every", "10.5", "2024-01-01", "1 2", "٣" * 3 + "x", b"3"]
)
def test_what_is_not_a_number_or_range_is_refused_with_its_value(piece: object) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(piece))):
        parse_steps([piece])


def test_an_empty_list_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="would select nothing"):
        parse_steps([])


def test_a_number_too_large_for_any_step_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than any step"):
        parse_steps("9" * 25)


def matches(pattern: str, name: str) -> bool:
    """Match by trying every split, straight from the definition: `**` any text, `*` no dot, `?` one that is no dot."""
    if not pattern:
        return not name
    if pattern.startswith("**"):
        return any(matches(pattern[2:], name[i:]) for i in range(len(name) + 1))
    if pattern.startswith("*"):
        return any("." not in name[:i] and matches(pattern[1:], name[i:]) for i in range(len(name) + 1))
    if not name:
        return False
    if pattern[0] == "?":
        return name[0] != "." and matches(pattern[1:], name[1:])
    return name[0] == pattern[0] and matches(pattern[1:], name[1:])


@given(st.text("ab.*?", min_size=1, max_size=6), st.text("ab.", max_size=7))
def test_a_glob_matches_as_its_definition_says(pattern: str, name: str) -> None:
    assert (name in parse_names([pattern])) == matches(pattern, name)


@given(
    st.lists(st.text("ab.*", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab.*", min_size=1, max_size=4), max_size=3)
)
def test_a_name_is_selected_when_some_pattern_matches_and_no_excluding_one_does(wanted: list[str], excluded: list[str]) -> None:
    names = parse_names([*wanted, *(f"!{p}" for p in excluded)])
    for name in ("a", "b", "a.b", "ab.a", ""):
        yes = any(matches(p, name) for p in wanted) or (not wanted and bool(excluded))
        assert (name in names) == (yes and not any(matches(p, name) for p in excluded))


def test_a_set_of_characters_matches_one_of_them() -> None:
    names = parse_names(["layers.[0-2].mlp", "x[!a]"])
    assert [n in names for n in ("layers.1.mlp", "layers.3.mlp", "xb", "xa")] == [True, False, True, False]


def test_brackets_around_a_star_mean_the_star_itself() -> None:
    names = parse_names(["a[*]b", "[[]c"])
    assert [n in names for n in ("a*b", "axb", "[c")] == [True, False, True]


def test_a_regular_expression_is_found_anywhere_in_the_name() -> None:
    assert "layers.12.mlp.fc1" in parse_names([r"re:\.\d{2}\."])


def test_a_broken_regular_expression_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"'re:\(' is not a regular expression: missing \)"):
        parse_names(["re:("])


@pytest.mark.parametrize("pattern", ["", "!"])
def test_an_empty_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="empty pattern"):
        parse_names([pattern])


def test_no_pattern_selects_no_name() -> None:
    assert "a" not in Names(())


def test_a_pattern_that_matches_nothing_is_told_with_the_nearest_name() -> None:
    names = parse_names(["layers.*.mpl", "layers.**", "!head"])
    assert names.unmatched(["layers.0.mlp", "layers.1.attn"]) == [("layers.*.mpl", "layers.0.mlp"), ("!head", None)]


def test_everything_is_known_without_asking() -> None:
    assert parse_names(["**"]).everything
    assert not parse_names(["**", "!a"]).everything
