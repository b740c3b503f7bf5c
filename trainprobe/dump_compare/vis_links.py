"""Which nodes of a graph file belong to one collective, or to one message, on several ranks: the page jumps along these."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from trainprobe.dump_compare.call_slots import group_ranks
from trainprobe.engine.core.records import Call

_MESSAGES = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
_FROM_ONE = ("broadcast", "scatter")
_TO_ONE = ("reduce", "gather")


@dataclass(frozen=True, slots=True)
class VisLink:
    """A node that takes part. key: what is equal on all ranks that take part. way: send, receive, or send_receive.

    root: the rank that all others send to, or are sent from; None where all do both.
    """

    node: str
    rank: int
    key: str
    way: str
    root: int | None = None


def links_of(calls: Iterable[tuple[str, Call]], rank: int) -> list[VisLink]:
    """Return what one rank takes part in. calls: name of the node and call, in order."""
    counts: Counter[str] = Counter()
    found: list[VisLink] = []
    for node, call in calls:
        if call.kind != "collective" or call.phase == "backward":
            continue
        name = call.name.rpartition(".")[2]
        if name in _MESSAGES:
            peer = _number(call, _MESSAGES[name])
            ends = (rank, peer) if _MESSAGES[name] == "dst" else (peer, rank)
            way, root, key = ("send" if _MESSAGES[name] == "dst" else "receive"), peer, f"message {ends}"
            if peer is None:
                continue
        else:
            root = _number(call, "src" if name in _FROM_ONE else "dst") if name in (*_FROM_ONE, *_TO_ONE) else None
            sends = (name in _FROM_ONE) == (root == rank)
            way, key = "send_receive" if root is None else "send" if sends else "receive", f"{call.name} {group_ranks(call)}"
        found.append(VisLink(node, rank, f"{key} {counts[key]}", way, root))
        counts[key] += 1
    return found


def _number(call: Call, name: str) -> int | None:
    """Return the rank that a call is given by name, `peer` in our dumps, or behind its tensor."""
    by_name = call.kwargs if isinstance(call.kwargs, Mapping) else {}
    given = by_name.get(name, by_name.get("peer"))
    if given is None and isinstance(call.args, list) and len(call.args) > 1:
        given = call.args[1]
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def matched(links: Sequence[VisLink], indices: Mapping[tuple[int, str], str]) -> dict[tuple[int, str], str]:
    """Return rank and node → the nodes of other ranks that it belongs to, as the page has it.

    links: of all ranks of one step and side. indices: rank and node → what the page shows of it there.
    """
    by_key: dict[str, list[VisLink]] = defaultdict(list)
    for link in links:
        by_key[link.key].append(link)
    found: dict[tuple[int, str], str] = {}
    for together in by_key.values():
        for link in together:
            others = [other for other in together if other.rank != link.rank and link.root in (None, link.rank, other.rank)]
            nodes = {str(other.rank): [indices.get((other.rank, other.node), "NaN"), other.node] for other in others}
            if nodes:
                about = {"communications_type": link.way, "nodes_info": nodes}
                found[link.rank, link.node] = orjson.dumps(about).decode()
    return found
