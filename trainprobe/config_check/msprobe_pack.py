"""Reads the pack that mindstudio-probe's config check leaves: statistics only, and no manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.config_check.capture.environment import capture_environment
from trainprobe.config_check.capture.setting_files import flat, source
from trainprobe.config_check.capture.shell_script import is_flag
from trainprobe.config_check.pack import Pack, RankPack
from trainprobe.config_check.pack_members import parse_json
from trainprobe.errors import FormatError

_STEP = re.compile(r"(dataset|weights)/step(\d{1,9})/rank(\d{1,6})/[\w.-]+\.json")
_RANDOM = re.compile(r"random/rank(\d{1,6})\.json")
_FRAME = re.compile(r"File (.*?), line (\d+), in (.*?),\s*(.*)", re.S)
_STATISTICS = frozenset({"max", "min", "mean", "norm"})


def is_msprobe(members: Mapping[str, bytes]) -> bool:
    """Tell whether these members are those of such a pack."""
    return any(
        n in ("env", "pip") or n.startswith("hyperparameters/") or _STEP.fullmatch(n) or _RANDOM.fullmatch(n) for n in members
    )


def read_msprobe(path: str, members: Mapping[str, bytes]) -> Pack:
    """Return the pack; what it captured once for the job stands under every rank. Secrets in its environment are left out."""
    trees = {n: parse_json(Path(path), n, raw) for n, raw in members.items() if n.endswith(".json") or n == "env"}
    for name, tree in trees.items():
        if not isinstance(tree, dict):
            raise FormatError(f"{path}: {name!r} holds a {type(tree).__name__} where an object belongs")
    shared: dict[str, Any] = {}
    if "env" in trees:
        shared["environment"] = capture_environment({str(k): str(v) for k, v in trees["env"].items()})
    if "pip" in members:
        shared["packages"] = {"distributions": _versions(members["pip"].decode("utf-8", "replace")), "platform": {}, "code": {}}
    if settings := [s for name, tree in trees.items() if name.startswith("hyperparameters/") for s in _settings(name, tree)]:
        shared["hyperparameters"] = {"sources": settings}
    steps: dict[int, dict[str, dict[int, Any]]] = {}
    single: dict[int, dict[str, Any]] = {}
    for name, tree in trees.items():
        if match := _STEP.fullmatch(name):
            content = {"tensors": _entries(tree)} if match[1] == "dataset" else {"parameters": _entries(tree)}
            steps.setdefault(int(match[3]), {}).setdefault(match[1], {})[int(match[2])] = content
        elif match := _RANDOM.fullmatch(name):
            single.setdefault(int(match[1]), {})["randomness"] = _random(tree)
    numbers = sorted(steps.keys() | single.keys()) or [0]
    ranks = {r: RankPack(r, {**shared, **single.get(r, {})}, steps.get(r, {})) for r in numbers}
    captured = tuple(dict.fromkeys(c for r in ranks.values() for c in (*r.single, *r.by_micro)))
    count = max((len(s) for r in ranks.values() for s in r.by_micro.values()), default=0)
    return Pack(path, ranks, numbers[-1] + 1, True, captured, count, (), "mindstudio-probe")


def _versions(text: str) -> dict[str, str]:
    pairs = (line.strip().partition("=")[::2] for line in text.splitlines() if "=" in line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version.lstrip("=") for name, version in pairs}


def _settings(member: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one source a file of static settings, and one of those that Megatron parsed."""
    tree = {k: _value(v) for k, v in tree.items()}
    if "dynamic" in member:
        return [source("megatron", "get_args", flat(tree))]
    files = {k: v for k, v in tree.items() if isinstance(v, dict)}
    if not files:
        return [source("shell", Path(member).name, flat(tree))]
    return [source("yaml" if k.endswith((".yaml", ".yml")) else "shell", Path(k).name, flat(v)) for k, v in files.items()]


def _value(value: Any) -> Any:
    """Return a flag's value; that tool takes the flag behind a flag without value for its value, and loses what follows."""
    if isinstance(value, dict):
        return {k: _value(v) for k, v in value.items()}
    return True if isinstance(value, str) and is_flag(value) else value


def _entries(tree: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, dict[str, Any]]:
    """Return dotted name → statistics of each tensor in a nested object."""
    if depth > 50:
        raise FormatError(f"{prefix[:80]}: nested too deeply to be a pack")
    found: dict[str, dict[str, Any]] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            if _STATISTICS & value.keys():
                found[name.removeprefix("kwargs.")] = {k: value[k] for k in _STATISTICS if k in value}
            else:
                found |= _entries(value, name, depth + 1)
    return found


def _random(tree: Mapping[str, Any]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    stacks: list[list[dict[str, Any]]] = []
    for function, entries in tree.items():
        for entry in entries if isinstance(entries, list) else []:
            calls.append(
                {"function": function, "detail": "", "window": -1, "count": int(entry.get("count", 1)), "stack": len(stacks)}
            )
            stacks.append([_frame(str(line)) for line in entry.get("stack", [])])
    return {"calls": calls, "stacks": stacks, "states": {}, "flags": {}}


def _frame(line: str) -> dict[str, Any]:
    """Take `File model.py, line 3, in forward, x = f(x)` apart."""
    match = _FRAME.fullmatch(line)
    if match is None:
        return {"file": "", "line": 0, "function": "", "source": line}
    installed = "/site-packages/" in match[1] or "/dist-packages/" in match[1]
    file = match[1].rpartition("-packages/")[2] if installed else "/".join(Path(match[1]).parts[-2:])
    return {"file": file, "line": int(match[2]), "function": match[3], "source": match[4].strip(), "installed": installed}
