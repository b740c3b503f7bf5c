"""A comparison as the SQLite file that the graph page of mindstudio-probe opens in TensorBoard (`--vis out.vis.db`).

A is what it calls NPU, B what it calls Bench. A node is a call; a verdict is a precision index: 0 for what agrees or is
explained, 0.5 for suspicious, 1 for a bug; a call without a partner has none, nor has one of which nothing can be compared.
Calls that make, pass on or swallow NaN and infinities stand in that page's lists of overflows, and its jumps lead along
collectives to the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from trainprobe.dump_compare.call_slots import is_result
from trainprobe.dump_compare.distances import Distance
from trainprobe.dump_compare.dump_side import Side, hexadecimal
from trainprobe.dump_compare.judge import Judged, Outcome
from trainprobe.dump_compare.page.document import holds_nonfinite
from trainprobe.dump_compare.page.tree import build_tree
from trainprobe.dump_compare.pairing import RankPair
from trainprobe.dump_compare.sheet import classic_name
from trainprobe.dump_compare.vis_links import VisLink, links_of, matched
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import entry_name, slots
from trainprobe.engine.storage.dumps.entry_text import KEYS
from trainprobe.engine.storage.safe_files import page_database

ROOT_NODE = "DefaultModel"
SOURCES = ("NPU", "Bench")
_INDEX: dict[Outcome, float | None] = {"identical": 0, "rounding": 0, "carried": 0, "suspicious": 0.5, "bug": 1}
_COLOURS = {
    "#FFFCF3": {
        "value": [0, 0.3],
        "description": "agrees, or is explained by rounding or by what arrives",
        "accuracy_level": "pass",
    },
    "#FFDC7F": {"value": [0.3, 0.6], "description": "suspicious", "accuracy_level": "warning"},
    "#FF704D": {"value": [0.6, 1], "description": "neither rounding nor what arrives explains it", "accuracy_level": "error"},
    "#C7C7C7": {"value": [], "description": "no partner, or nothing to compare", "accuracy_level": "unmatched"},
}
_TIPS = {"Apart": "distance, relative l2; a lower bound where only statistics are known", "Verdict": "verdict of the call"}
_TABLES = """
CREATE TABLE tb_config (id TEXT PRIMARY KEY, graph_type TEXT NOT NULL, task TEXT, tool_tip TEXT, micro_steps INTEGER,
  overflow_check INTEGER, node_colors TEXT NOT NULL, rank_list TEXT NOT NULL, step_list TEXT NOT NULL);
CREATE TABLE tb_stack (id TEXT PRIMARY KEY, stack_info TEXT);
CREATE TABLE tb_nodes (id TEXT PRIMARY KEY, graph_id TEXT NOT NULL, node_order INTEGER NOT NULL, node_name TEXT NOT NULL,
  node_type TEXT NOT NULL, up_node TEXT, sub_nodes TEXT, precision_index INTEGER, overflow_level TEXT,
  micro_step_id INTEGER NOT NULL, matched_node_link TEXT, stack_id TEXT, parallel_merge_info TEXT, matched_distributed TEXT,
  modified INTEGER NOT NULL, input_data TEXT, output_data TEXT, data_source TEXT NOT NULL, dump_data_dir TEXT,
  step INTEGER NOT NULL, rank INTEGER NOT NULL, is_distributed INTEGER);
CREATE INDEX nodes_below ON tb_nodes (step, rank, data_source, up_node, node_order);
CREATE INDEX nodes_by_name ON tb_nodes (step, rank, data_source, node_name);
CREATE INDEX nodes_of_side ON tb_nodes (step, rank, data_source, node_order);
CREATE INDEX nodes_in_order ON tb_nodes (step, rank, node_order);
CREATE INDEX nodes_of_micro ON tb_nodes (step, rank, micro_step_id, node_order);
CREATE INDEX nodes_matched ON tb_nodes (step, rank, modified, matched_node_link);
CREATE INDEX nodes_distributed ON tb_nodes (is_distributed);
"""


@dataclass
class VisRank:
    """The nodes of one rank and step, and the stacks they refer to: rows of tb_nodes (see the columns there), id → lines.

    links: of each side, the collectives and messages that the rank takes part in.
    """

    step: int
    rank: int
    micro_batches: int
    nodes: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    stacks: dict[str, str] = field(default_factory=dict[str, str])
    links: tuple[list[VisLink], ...] = ()


@dataclass
class _Node:
    """A node of one side. way: names from the root to it."""

    name: str
    way: list[str]
    one: Judged | None
    below: list[str] = field(default_factory=list[str])


def vis_of_rank(pair: RankPair, judged: Sequence[Judged], sides: tuple[Side, Side]) -> VisRank:
    """Return the nodes of one rank and step, of both sides."""
    trees = [_tree(judged, side, which) for which, side in zip("ab", sides, strict=True)]
    micro_batches = len({one.call.micro for one in judged if one.call.micro is not None})
    found = VisRank(pair.step, pair.rank, max(1, micro_batches), stacks={"": "[]"})
    found.links = tuple([links_of(_calls(tree, which), pair.rank) for which, tree in enumerate(trees)])
    for mine, theirs, source in zip(trees, reversed(trees), SOURCES, strict=True):
        by_call = {id(node.one): node for node in theirs if node.one is not None}
        for order, node in enumerate(mine):
            partner = theirs[0] if node.one is None else by_call.get(id(node.one))
            found.nodes.append(_row(found, node, order, source, [] if partner is None else partner.way, sides))
    return found


def _calls(nodes: Sequence[_Node], which: int) -> Iterator[tuple[str, Call]]:
    """Yield the calls of the nodes of one side by the names of these."""
    for node in nodes:
        call = None if node.one is None else (node.one.pair.a, node.one.pair.b)[which]
        if call is not None:
            yield node.name, call


def _tree(judged: Sequence[Judged], side: Side, which: str) -> list[_Node]:
    """Return the nodes of one side in order, each below the nearest call around it that this side has."""
    root = _Node(ROOT_NODE, [ROOT_NODE], None)
    nodes, way = [root], [(0, root)]
    taken = {ROOT_NODE}
    for line in build_tree(judged):
        while len(way) > 1 and way[-1][0] >= line.depth:
            way.pop()
        call: Call | None = getattr(judged[line.call].pair, which) if line.call >= 0 else None
        name = "" if call is None else entry_name(call, side.step_data.framework)
        if call is None or name in taken:  # a recomputed forward has the name of the first one
            continue
        taken.add(name)
        up = way[-1][1]
        node = _Node(name, [*up.way, name], judged[line.call])
        up.below.append(name)
        nodes.append(node)
        way.append((line.depth, node))
    return nodes


def _row(rank: VisRank, node: _Node, order: int, source: str, link: list[str], sides: tuple[Side, Side]) -> tuple[Any, ...]:
    """Return the row of tb_nodes, in the order of its columns."""
    graph = f"{source}_{rank.step}_{rank.rank}"
    about: tuple[Any, ...] = (f"{graph}_{node.name}", graph, order, node.name)
    up = node.way[-2] if len(node.way) > 1 else ""
    below = orjson.dumps(node.below).decode() if node.below else ""
    matched = orjson.dumps(link).decode() if link else ""
    if node.one is None:
        about += ("0", up, below, None, None, 0, matched, "", None, None, 0, "{}", "{}")
        return (*about, source, None, rank.step, rank.rank, 0)
    which = SOURCES.index(source)
    call = node.one.pair.b if which else node.one.pair.a
    assert call is not None
    data = _values(node.one, call, sides[which])
    stack = _stack(rank, call, sides[which], source)
    kind = "0" if call.kind in ("module", "parameter") else "1"
    level = _overflow_level(call, sides[which])
    about += (kind, up, below, _INDEX.get(node.one.outcome), level, call.micro or 0, matched, stack, None, None, 0, *data)
    return (*about, source, str(sides[which].folder), rank.step, rank.rank, int(call.kind == "collective"))


def _overflow_level(call: Call, side: Side) -> str | None:
    """Return how a call has to do with NaN and infinities: critical where it makes them of finite numbers, None for not at all.

    high: it is given some and gives some. medium: it gives none.
    """
    given, gives = (any(holds_nonfinite(value, side) for value in of) for of in _given_and_given_back(call))
    return ("high" if given else "critical") if gives else "medium" if given else None


def _given_and_given_back(call: Call) -> tuple[list[Value], list[Value]]:
    found = slots(call)
    results = [_is_result(call, slot) for slot, _ in found]
    given, gives = (
        [value for (_, value), result in zip(found, results, strict=True) if result == which] for which in (False, True)
    )
    return given, gives


def _is_result(call: Call, slot: str) -> bool:
    return call.kind in ("parameter", "saved") or is_result(slot)


def _stack(rank: VisRank, call: Call, side: Side, source: str) -> str:
    if not 0 <= call.stack < len(side.step_data.stacks):
        return ""
    name = f"{source}_{rank.step}_{rank.rank}_{call.stack}"
    rank.stacks[name] = orjson.dumps([str(frame) for frame in side.step_data.stacks[call.stack]]).decode()
    return name


def _values(one: Judged, call: Call, side: Side) -> tuple[str, str]:
    """Return what a call is given and what it gives, as JSON: name → what is known of it, as texts."""
    distances = {value.slot: value for value in one.values}
    given: dict[str, Any] = {}
    gives: dict[str, Any] = {}
    for slot, value in slots(call):
        name = classic_name(call, slot, side.step_data.framework)
        (gives if _is_result(call, slot) else given)[name] = _described(one, value, side, distances.get(slot))
    return orjson.dumps(given).decode(), orjson.dumps(gives).decode()


def _described(one: Judged, value: Value, side: Side, distance: Distance | None) -> Mapping[str, str]:
    numbers = side.numbers(value)
    about = {"type": value.type, "dtype": value.dtype, "shape": str(list(value.shape))}
    about |= {head: str(numbers[name]) for name, head in KEYS.items() if name in numbers}
    about |= next(({"md5": hexadecimal(kind, number)} for kind, number in side.bits(value).items()), {})
    if distance is not None:
        about |= {"Apart": str(distance.low), "Verdict": one.outcome}
        says = "; ".join(text for text in (distance.interval.note, one.argument if distance.result else "") if text)
        about |= {"Reason": says} if says else {}
    return about


def write_vis_db(ranks: Sequence[VisRank], path: Path) -> Path:
    """Write the file, whole or not at all, and return where. Raises OutputError where it cannot be written."""
    with page_database(path, ".vis.db", "--vis") as database:
        database.executescript(_TABLES)
        database.execute(f"INSERT INTO tb_config VALUES ({', '.join('?' * 9)})", _config(ranks))
        database.executemany("INSERT OR IGNORE INTO tb_stack VALUES (?, ?)", _stacks(ranks))
        database.executemany(f"INSERT INTO tb_nodes VALUES ({', '.join('?' * 22)})", _with_jumps(ranks))
    return path


_NAME, _LEVEL, _INDEX_AT, _JUMPS, _SOURCE = 3, 8, 7, 13, 17  # places in a row of tb_nodes


def _with_jumps(ranks: Sequence[VisRank]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of all ranks; a collective's has those of the other ranks that take part in it."""
    told = _LEVEL if _overflows(ranks) else _INDEX_AT
    for step in sorted({rank.step for rank in ranks}):
        here = [rank for rank in ranks if rank.step == step]
        for which, source in enumerate(SOURCES):
            rows = [(rank, row) for rank in here for row in rank.nodes if row[_SOURCE] == source]
            indices = {(rank.rank, row[_NAME]): "NaN" if row[told] is None else str(row[told]) for rank, row in rows}
            jumps = matched([link for rank in here for link in rank.links[which]], indices)
            for rank, row in rows:
                yield (*row[:_JUMPS], jumps.get((rank.rank, row[_NAME])), *row[_JUMPS + 1 :])


def _overflows(ranks: Sequence[VisRank]) -> bool:
    return any(row[_LEVEL] is not None for rank in ranks for row in rank.nodes)


def _stacks(ranks: Sequence[VisRank]) -> Iterator[tuple[str, str]]:
    for rank in ranks:
        yield from rank.stacks.items()


def _config(ranks: Sequence[VisRank]) -> tuple[Any, ...]:
    def listed(numbers: set[int]) -> str:
        return orjson.dumps(sorted(numbers)).decode()

    colours, tips = orjson.dumps(_COLOURS).decode(), orjson.dumps(_TIPS).decode()
    micro = max((rank.micro_batches for rank in ranks), default=1)
    steps, of_ranks = {rank.step for rank in ranks}, {rank.rank for rank in ranks}
    return "1", "compare", "summary", tips, micro, int(_overflows(ranks)), colours, listed(of_ranks), listed(steps)
