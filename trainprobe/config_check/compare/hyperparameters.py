"""Compares settings: source by source, then by what one setting is called in another framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainprobe.config_check.capture.setting_files import ASTRAY, IDLE_LOADER
from trainprobe.config_check.compare.frameworks import TO_FLOAT
from trainprobe.config_check.compare.model_state import state_findings
from trainprobe.config_check.compare.module_texts import class_and_arguments
from trainprobe.config_check.compare.pair import BENCH, CMP, absent, rank_findings, rank_pairs
from trainprobe.config_check.compare.step_schedule import schedule_findings
from trainprobe.config_check.compare.values import meaning, same
from trainprobe.config_check.compare.verdicts import LEVELS, Check, Level, PackFinding, shown, which_ranks
from trainprobe.config_check.names import load_names
from trainprobe.config_check.pack import Pack, RankPack
from trainprobe.engine.core.words import counted

COLUMNS = ("source", "bench name", "cmp name", "bench", "cmp", "matched by", "ranks", "level")
_KINDS = {
    "arguments": "arguments of the program",
    "megatron": "Megatron arguments",
    "deepspeed": "DeepSpeed configuration",
    "transformers": "TrainingArguments",
    "lightning": "Lightning Trainer",
    "model settings": "settings of the model",
    "shell": "shell script",
    "yaml": "YAML file",
    "json": "JSON file",
    "loader": "data loader",
    IDLE_LOADER: "data loader from which no captured step drew",
    "wrapper": "data-parallel wrapper",
    "clipping": "gradient clipping",
    "scaler": "loss scaler",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
}
_LEADING = ("function", "class", "batch_size", "loss_scale")  # the setting without which there is no such object
_OF_OBJECTS = (
    "loader",
    IDLE_LOADER,
    "clipping",
    "scaler",
    "optimizer",
    "scheduler",
)  # kinds of which each source is one object of the program
# kinds whose settings are all those that a library knows → the packages whose other version may know others
_KNOWN_BY = {
    "transformers": ("package transformers",),
    "model settings": ("package transformers",),
    "megatron": ("package megatron",),
    "lightning": ("package lightning", "package pytorch-lightning"),
}
_MOST_REPORTED = 8
_DRAWN = ("setting seed", "setting data_seed", "random seed", "generator seed")  # what the seed of a generator may come from
# settings that show again in the structure of the model
_SHAPING = tuple(
    f"setting {name}"
    for name in (
        *(
            "hidden_dropout",
            "attention_dropout",
            "layers",
            "hidden_size",
            "ffn_hidden_size",
            "attention_heads",
            "query_groups",
            "vocabulary",
        ),
        *(
            "normalization_epsilon",
            "sequence_length",
            "max_positions",
            "rotary_base",
            "tied_embeddings",
            "tensor_parallel",
            "pipeline_parallel",
            "lora_rank",
            "lora_alpha",
            "lora_dropout",
        ),
    )
)


@dataclass(frozen=True)
class _Item:
    kind: str
    number: int
    source: str
    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class _Difference:
    """One row of the table; None for a side that lacks it."""

    left: _Item | None
    right: _Item | None
    matched_by: str
    level: Level


def compare_hyperparameters(bench: Pack, cmp: Pack) -> Check:
    """Compare all sources of settings, by value."""
    if (early := absent("hyperparameters", COLUMNS, bench, cmp)) is not None:
        return early
    same_size = bench.world_size == cmp.world_size
    pairs = list(rank_pairs(bench, cmp, "hyperparameters"))
    ranks = [rank for rank, _, _ in pairs]
    gathered: dict[str, tuple[_Difference, list[int]]] = {}
    for rank, a, b in pairs:
        left, right = _items(a.single["hyperparameters"]), _items(b.single["hyperparameters"])
        for difference in _differences(left, right, same_size):
            gathered.setdefault(repr((difference.left, difference.right)), (difference, []))[1].append(rank)
    rows = [_row(difference, where, ranks) for difference, where in gathered.values()]
    findings = rank_findings("hyperparameters", bench, cmp)
    findings += _structure(gathered, ranks)
    findings += [f for d, where in gathered.values() if not _is_module(d) for f in _finding(d, which_ranks(where, ranks))]
    findings += _of_ranks(pairs, ranks, same_size)
    findings.sort(key=lambda f: (-LEVELS.index(f.level), _rank_of_topic(f.topic)))
    return Check("hyperparameters", COLUMNS, rows, _shortened(findings))


def _rank_of_topic(topic: str) -> int:
    """Return 0 for a setting or a class, whose defaults are settings, 1 for any other value, 2 for what they make."""
    return 0 if topic.startswith(("setting ", "key class")) else 1 if topic.startswith("key ") else 2


def _of_ranks(pairs: list[tuple[int, RankPack, RankPack]], ranks: list[int], same_size: bool) -> list[PackFinding]:
    """Return what differs in the models' states and in the times at which optimizers step."""
    ranks_of: dict[PackFinding, list[int]] = {}
    for rank, a, b in pairs:
        found = state_findings(a.single["hyperparameters"], b.single["hyperparameters"])
        found += [*_astray(BENCH, a.single["hyperparameters"]), *_astray(CMP, b.single["hyperparameters"])]
        for finding in [*found, *(schedule_findings(a, b) if same_size else ())]:
            ranks_of.setdefault(finding, []).append(rank)
    return [replace(f, text=f"{f.text}{which_ranks(where, ranks)}") for f, where in ranks_of.items()]


def _astray(side: str, content: Mapping[str, Any]) -> Iterator[PackFinding]:
    """Yield the schedulers of one side that do not reach the optimizer which steps; the other side may have the same fault."""
    for one in content.get("sources", []):
        values = dict(one.get("values", {}))
        if one.get("kind") == "scheduler" and values.get(ASTRAY) is True:
            text = f"{values.get('class')} in {side} does not reach the optimizer that steps: it was made for another one"
            yield PackFinding("error", text, f"key scheduler.astray {side}", ())


def _items(content: Mapping[str, Any]) -> dict[tuple[str, int, str], _Item]:
    """Return (kind, number of the source within its kind, key) → item."""
    found: dict[tuple[str, int, str], _Item] = {}
    counts: dict[str, int] = {}
    for one in content.get("sources", []):
        kind = str(one.get("kind"))
        number = counts[kind] = counts.get(kind, -1) + 1
        for key, value in dict(one.get("values", {})).items():
            if key == ASTRAY:
                continue
            found[kind, number, key] = _Item(kind, number, str(one.get("name")), key, value)
    return found


def _differences(left: dict[Any, _Item], right: dict[Any, _Item], same_size: bool) -> Iterator[_Difference]:
    """Match by place, then by setting; yield what differs or has no counterpart."""
    names = load_names()
    settings = (_by_setting(left), _by_setting(right))
    matched: set[int] = set()
    for place in [*left, *(p for p in right if p not in left)]:
        a, b = left.get(place), right.get(place)
        matched_by = "name"
        if a is None or b is None:
            one_sided, others = (a, settings[1]) if a is not None else (b, settings[0])
            assert one_sided is not None
            setting = (
                names.setting(one_sided.key)
                if one_sided.kind not in ("model", *_OF_OBJECTS) or len(left) * len(right) == 0
                else None
            )
            counterparts = others.get(setting[0], []) if setting else []
            if counterparts:
                other = next((o for o in counterparts if same(o.value, one_sided.value)), counterparts[0])
                a, b = (one_sided, other) if a is not None else (other, one_sided)
                matched_by = "table of names"
        if a is not None and b is not None:
            if same(_decisive(a.value), _decisive(b.value)) or (id(a) in matched and id(b) in matched):
                continue
            matched |= {id(a), id(b)}
        key = (a or b).key  # pyright: ignore[reportOptionalMemberAccess]
        kind = (a or b).kind  # pyright: ignore[reportOptionalMemberAccess]
        if (kind == "wrapper" or names.follows_rank_count(key)) and not same_size:
            continue
        both_set = a is not None and b is not None and not (_is_unset(a.value) and _is_unset(b.value))
        harmless = names.is_place(key) or names.is_speed(key) or kind == IDLE_LOADER
        level: Level = "note" if harmless else "error" if both_set else "warning"
        yield _Difference(a, b, matched_by, level)


def _decisive(value: Any) -> Any:
    """Return a value without what it holds of loading speed, as the number of workers among a worker function's arguments."""
    return {k: v for k, v in value.items() if not load_names().is_speed(str(k))} if isinstance(value, Mapping) else value


def _is_unset(value: Any) -> bool:
    """Tell whether a setting is none or false, of which releases of one framework take now one, now the other."""
    return meaning(value) is None or meaning(value) is False


def _by_setting(items: dict[Any, _Item]) -> dict[str, list[_Item]]:
    names = load_names()
    found: dict[str, list[_Item]] = {}
    for item in items.values():
        setting = names.setting(item.key)
        if setting is not None:
            found.setdefault(setting[0], []).append(item)
    return found


def _row(d: _Difference, where: list[int], ranks: list[int]) -> tuple[Any, ...]:
    item = d.left or d.right
    assert item is not None
    ranks_text = which_ranks(where, ranks).removeprefix(" on ") or ("all" if len(ranks) > 1 else str(ranks[0]))
    left, right = (shown(i.value, 200) if i is not None else "(missing)" for i in (d.left, d.right))
    keys = (i.key if i is not None else "" for i in (d.left, d.right))
    return (f"{item.kind}: {item.source}", *keys, left, right, d.matched_by, ranks_text, d.level)


def _finding(d: _Difference, where: str) -> list[PackFinding]:
    """Report one difference, unless its whole source is on one side only, which is reported once."""
    if d.left is None or d.right is None:
        item = d.left or d.right
        assert item is not None
        side = BENCH if d.left is not None else CMP
        return [
            PackFinding(
                d.level,
                f"{_name(item)} is only in {side}: {shown(item.value)}{where}",
                f"lone {item.kind} {item.number} {item.key}",
                ("key function", "key class", "key scheduler.class")
                if item.kind in _OF_OBJECTS
                else _KNOWN_BY.get(item.kind, ()),
            )
        ]
    setting = load_names().setting(d.left.key)
    label, topic = (setting[1], f"setting {setting[0]}") if setting else (_name(d.left), f"key {d.left.key.rsplit('.', 1)[-1]}")
    if d.left.key == "lr_by_step":
        return [_rates(d.left.value, d.right.value, where)]
    if d.left.kind in ("optimizer", "scheduler") and d.left.key.endswith(".parameters"):
        text = f"the parameters in {d.left.key.removesuffix('.parameters')} of the optimizer differ{where}"
        return [
            PackFinding("error", text, "optimizer groups", ("model", "requires_grad", "lone weights", "weight names", "mode"))
        ]
    text = f"{label} differs: {shown(d.left.value)} and {shown(d.right.value)}{where}"
    if not setting and d.left.kind == "scheduler":
        topic = f"key scheduler.{d.left.key}"
    explained_by = _DRAWN if topic == "key generator" else ()
    if d.left.kind == "optimizer" and d.left.key.endswith(".lr"):  # as it is at the first step, after the scheduler
        explained_by = ("key scheduler.", "source scheduler", "lone scheduler")
    return [PackFinding(d.level, text, topic, explained_by, suspect=load_names().is_speed(d.left.key))]


def _name(item: _Item) -> str:
    return f"{_KINDS[item.kind]} {item.key}" if item.kind in _OF_OBJECTS else item.key


def _rates(a: Any, b: Any, where: str) -> PackFinding:
    """Say from which optimizer step on learning rates differ; fewer steps on one side are no difference by themselves."""
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if not same(x, y)), None)
    if first is None:
        return PackFinding("note", f"{counted(len(a), 'optimizer step')} and {len(b)} were captured{where}", "captured steps")
    left, right = (x[0] if isinstance(x, list) and len(x) == 1 else x for x in (a[first], b[first]))
    text = f"learning rate differs from optimizer step {first} on: {shown(left)} and {shown(right)}{where}"
    return PackFinding("error", text, "rates", ("setting ", "key ", "lone ", "source "))


def _is_module(d: _Difference) -> bool:
    return (d.left or d.right).kind == "model"  # pyright: ignore[reportOptionalMemberAccess]


def _structure(gathered: Mapping[str, tuple[_Difference, list[int]]], ranks: list[int]) -> list[PackFinding]:
    """Report how the modules differ: settings of the same class together, then classes, then modules of one side alone."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for d, where in gathered.values():
        if not _is_module(d):
            continue
        place = which_ranks(where, ranks)
        if d.left is None or d.right is None:
            item = d.left or d.right
            assert item is not None
            groups.setdefault(("only", BENCH if d.left else CMP, place), []).append(f"{item.key}: {item.value}")
            continue
        (a, left), (b, right) = (class_and_arguments(str(v)) for v in (d.left.value, d.right.value))
        if a == b and left and right:
            for name in [*left, *(n for n in right if n not in left)]:
                x, y = (side.get(name, "(default)") for side in (left, right))
                if x != y:
                    kind = "" if name == TO_FLOAT else a
                    groups.setdefault(("argument", kind, name, x, y, place), []).append(d.left.key)
        else:
            groups.setdefault(("class", str(d.left.value), str(d.right.value), place), []).append(d.left.key)
    return [PackFinding("error", _structure_text(key, modules), "model", _SHAPING) for key, modules in groups.items()]


def _structure_text(key: tuple[str, ...], modules: list[str]) -> str:
    names = f"module {modules[0]}" if len(modules) == 1 else f"{len(modules)} modules, {modules[0]} the first,"
    if key[0] == "only":
        return f"{counted(len(modules), 'module')} only in {key[1]}{key[2]}: {shown(modules[0], 100)}"
    if key[0] == "argument":
        what = "dropout p" if "ropout" in key[1] and key[2] == "p" else f"{key[2]} of {key[1]}" if key[1] else key[2]
        return f"{what} in {names} differs: {key[3]} and {key[4]}{key[5]}"
    return f"{names} differs: {shown(key[1], 100)} and {shown(key[2], 100)}{key[3]}"


def _value_text(one_sided: PackFinding) -> str:
    """Return `max_norm 1` of a finding about a setting that one side has."""
    return f"{one_sided.topic.rsplit(' ', 1)[-1]} {one_sided.text.partition(': ')[2]}"


def _shortened(findings: list[PackFinding]) -> tuple[PackFinding, ...]:
    """Say settings that only one side has once a source, and no more than a line can hold."""
    kept: list[PackFinding] = []
    one_sided: dict[tuple[str, str], list[PackFinding]] = {}
    for finding in findings:
        if finding.topic.startswith("lone "):
            kind = finding.topic.split(" ")[1]
            side = BENCH if f"only in {BENCH}:" in finding.text else CMP
            one_sided.setdefault((kind, side), []).append(finding)
        else:
            kept.append(finding)
    for (kind, side), group in one_sided.items():
        whole = kind in _OF_OBJECTS and any(f.topic.rsplit(" ", 1)[-1] in _LEADING for f in group)
        if len(group) <= 2 and not whole:
            kept += group
            continue
        level: Level = "warning" if any(f.level != "note" for f in group) else "note"
        text = f"{len(group)} settings of the {_KINDS.get(kind, kind)} are only in {side}"
        text = f"{_KINDS[kind]} is only in {side}: {', '.join(map(_value_text, group[:3]))}" if whole else text
        kept.append(PackFinding(level, text, f"source {kind} {side}", group[0].explained_by))
    reported, rest = kept[:_MOST_REPORTED], kept[_MOST_REPORTED:]
    if any(f.level == "error" for f in rest):
        reported.append(PackFinding("error", f"{counted(len(rest), 'more setting')} differ", "key more"))
    elif rest:
        reported += rest[:2]
    return tuple(reported)
