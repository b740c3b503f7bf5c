"""Compares an engine that writes text with a forward of a trainer: a prefill and decode steps are joined along their tokens.

Each dump holds one step of forwards with stored values. A forward of the whole model is a pass; the engine's passes, one after
the other, are the text, and each of its rows is looked for in a row of the trainer, which may hold other texts beside it. Of
each module the calls of all passes become one, whose values have a row for each token that both sides have: [tokens, …]. What
has no axis of tokens (masks, caches, plain arguments) is left out, and so are positions that only the model itself is given.
Where the engine calculates logits of the last token of a pass alone, both sides have those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainprobe.dump_compare.command import compare_rank
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.layouts.compare import Maker
from trainprobe.dump_compare.pairing import pair_ranks
from trainprobe.dump_compare.renamed.token_rows import Indices, Pass, Tokens, TokenSide, passes_of, takes_last
from trainprobe.dump_compare.results import Compared, DumpsVerdict
from trainprobe.dump_compare.verdict import judge_runs
from trainprobe.engine.core.words import and_more, counted
from trainprobe.errors import CompareError

LEAST = 2  # tokens in a row by which a text is known


def compare_along_tokens(
    engine: Path, trainer: Path, rename: Callable[[str], str] = str, make: Mapping[str, Maker] | None = None
) -> tuple[list[Compared], DumpsVerdict]:
    """Compare the dumps of an engine and of a trainer, each module over all tokens that both have.

    rename, make: as of `compare_rank`. Raises FormatError where there is no dump, CompareError where values are not stored or
    no text of the engine is in the trainer's.
    """
    pairs, missing = pair_ranks(engine, trainer)
    found: list[Compared] = []
    for pair in pairs:
        sides = Side(pair.a), Side(pair.b)
        passes = passes_of(sides[0]), passes_of(sides[1])
        tokens = _matched(*passes)
        opened = tuple(TokenSide(side, each) for side, each in zip(sides, tokens, strict=True))
        compared = compare_rank(pair, rename, make=make, opened=(opened[0], opened[1]))
        number = counted(len(tokens[0].of), "token")
        said = [f"compared along {number}: A has {len(passes[0])} forwards of the model, B {len(passes[1])}"]
        for name, side in zip("AB", opened, strict=True):
            if side.left:
                said.append(f"{name} does not call once in each forward, and these are not joined: {and_more(side.left)}")
        found.append(replace(compared, notes=[*said, *compared.notes]))
    return found, judge_runs(found, missing)


def _matched(a: Sequence[Pass], b: Sequence[Pass]) -> tuple[Tokens, Tokens]:
    """Return where the tokens that both sides have are on each, in one order. Raises CompareError where there are none."""
    rows = [(number, row) for number, each in enumerate(b) for row in range(len(each.ids))]
    if len({len(each.ids) for each in a}) > 1:
        raise CompareError("the forwards of A have different numbers of rows: record one prefill and its decode steps")
    free, places = list(rows), list[tuple[int, int, int, int]]()
    for row in range(len(a[0].ids)):
        text = np.concatenate([each.ids[row] for each in a])
        where = [(n, row * each.ids.shape[1] + i) for n, each in enumerate(a) for i in range(each.ids.shape[1])]
        begin, (number, other), at = _found(text, [(r, b[r[0]].ids[r[1]]) for r in (*free, *rows)])
        free = [r for r in free if r != (number, other)]
        first = other * b[number].ids.shape[1] + at - begin
        places += [(*where[i], number, first + i) for i in range(begin, len(text))]
    table = np.array(places, np.int64)
    last = np.ones(len(table), bool)
    for side, columns in ((a, table[:, :2]), (b, table[:, 2:])):
        if takes_last(side):
            length = np.array([each.ids.shape[1] for each in side])[columns[:, 0]]
            last &= columns[:, 1] % length == length - 1
    return Tokens(a, table[:, 0], table[:, 1], last), Tokens(b, table[:, 2], table[:, 3], last)


def _found(text: Indices, rows: Sequence[tuple[tuple[int, int], Indices]]) -> tuple[int, tuple[int, int], int]:
    """Return from which token a text, behind its padding, is in one of some rows; which row that is, and where it begins there.

    Raises CompareError where it is in none.
    """
    for begin in range(len(text) - LEAST + 1):
        if begin and text[begin - 1] != text[0]:
            break  # padding is one token, again and again
        wanted = text[begin:].tobytes()
        for place, ids in rows:
            held, at = ids.tobytes(), -1
            while (at := held.find(wanted, at + 1)) >= 0:
                if at % text.itemsize == 0:
                    return begin, place, at // text.itemsize
    raise CompareError(
        f"no row of B has the text of A, {counted(len(text), 'token')} that begin with {text[:8].tolist()}: "
        "give the trainer the prompt and the response that the engine wrote"
    )
