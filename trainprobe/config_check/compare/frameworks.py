"""A run of PyTorch held against one of MindSpore: both are put into PyTorch's words, and what differs by nature is a note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainprobe.config_check.compare.module_texts import class_and_arguments, text_of
from trainprobe.config_check.compare.pair import BENCH, CMP
from trainprobe.config_check.compare.values import close, meaning, same
from trainprobe.config_check.compare.verdicts import Check
from trainprobe.config_check.pack import Pack, RankPack
from trainprobe.engine.core.naming import torch_parameter

# class of mindspore.nn → that of torch.nn or torch.optim which calculates the same
_CLASSES = {
    **{"Dense": "Linear", "CellList": "ModuleList", "SequentialCell": "Sequential", "CellDict": "ModuleDict"},
    **{"RmsNorm": "RMSNorm", "Conv2dTranspose": "ConvTranspose2d"},
    **{f"{name}Ext": name for name in ("LayerNorm", "Dropout", "Embedding")},
    "Momentum": "SGD",
}
# arguments of cells → of modules; those that say the same in other numbers are not compared
_ARGUMENTS = {
    **{"epsilon": "eps", "has_bias": "bias", "in_channels": "in_features", "out_channels": "out_features"},
    **{"axis": "dim", "group": "groups"},
}
_ARGUMENTS_OF = {"LeakyReLU": {"alpha": "negative_slope"}}
_OTHER_NUMBERS = frozenset({"padding", "pad_mode", "inplace"})
_DECISIVE = frozenset({"p", "approximate"})  # beside fractions: settings that one side's lack of is told
TO_FLOAT = "to_float"
# how optimizers of torch calculate; those of MindSpore stand in their packs
_FORMULAS: Mapping[str, Mapping[str, Any]] = {
    name: {"bias_correction": True, "eps": "behind the bias correction", "weight_decay": decay}
    for name, decay in (("Adam", "added to the gradient"), ("AdamW", "decoupled"))
}
_IN_OLDER_PACKS = {"AdamWeightDecay": {"bias_correction": False, "weight_decay": "decoupled"}}
_OF_GROUPS = ("momentum", "weight_decay", "eps", "nesterov")  # what an optimizer of torch keeps for each group
_BETAS = ("beta1", "beta2")
# numbers of an optimizer that one framework alone has, where they change nothing
_CHANGES_NOTHING = {"loss_scale": 1.0, "dampening": 0, "amsgrad": False, "nesterov": False}
_OF_TORCH = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "initial_lr")
_SAME_RATE = 1e-5  # relative: a schedule that one framework works out in float32
BY_NATURE = {
    "environment": "environment variables, which are each framework's own",
    "packages": "packages, which are each framework's own",
    "randomness": "random calls, which MindSpore does not show",
}


def framework_of(pack: Pack) -> str:
    """Return "mindspore" or "torch"."""
    names = [rank.single.get("hyperparameters", {}).get("framework") for rank in pack.ranks.values()]
    return next((str(one) for one in names if one), "torch")


def in_common_words(bench: Pack, cmp: Pack) -> tuple[Pack, Pack, tuple[str, ...]]:
    """Return two packs of different frameworks in PyTorch's words, and notes on what one side lacks.

    Classes, parameters, settings of modules and numbers of optimizers have PyTorch's names. What is a default, and settings of
    modules that one side alone knows, are left out.
    """
    packs = [replace(pack, ranks={number: _rank(rank) for number, rank in pack.ranks.items()}) for pack in (bench, cmp)]
    notes: dict[str, None] = {}
    for number in packs[0].ranks.keys() & packs[1].ranks.keys():
        sides = [pack.ranks[number] for pack in packs]
        computes_in_half = any(_autocast(side) for side in sides)
        held = [{(one["kind"], one["name"]): one for one in _sources(side)} for side in sides]
        for key in held[0].keys() & held[1].keys():
            values = [side[key]["values"] for side in held]
            if key[0] == "model":
                notes |= dict.fromkeys(_align_modules(*values, autocast=computes_in_half))
            elif key[0] == "optimizer":
                notes |= dict.fromkeys(_align_optimizers(*values))
    return packs[0], packs[1], tuple(notes)


def _sources(rank: RankPack) -> list[dict[str, Any]]:
    return rank.single.get("hyperparameters", {}).get("sources", [])


def _autocast(rank: RankPack) -> bool:
    return (rank.single.get("randomness", {}).get("flags") or {}).get("autocast", "off") not in ("off", None)


def _align_modules(a: dict[str, Any], b: dict[str, Any], *, autocast: bool) -> list[str]:
    """Leave of modules of one class what differs; return which settings one side alone knows, a note for each."""
    lacking: dict[str, None] = {}
    for name in a.keys() & b.keys():
        (left, mine), (right, theirs) = (class_and_arguments(str(values[name])) for values in (a, b))
        if left == right:
            for side, one, other in ((BENCH, mine, theirs), (CMP, theirs, mine)):
                for key in [key for key in one if key not in other]:
                    if key == TO_FLOAT and not autocast:
                        other[key] = "(none)"
                    elif key in _DECISIVE or isinstance(meaning(one[key]), float):
                        lacking[f"{key} of {left} is known in {side} alone: not compared"] = None
            apart = [key for key in mine if key in theirs and not _alike(mine[key], theirs[key])]
            mine, theirs = ({key: side[key] for key in apart} for side in (mine, theirs))
        a[name], b[name] = text_of(left, mine), text_of(right, theirs)
    for values in (a, b):
        values |= {
            name: text_of(class_and_arguments(str(values[name]))[0], {}) for name in values.keys() - (a.keys() & b.keys())
        }
    return sorted(lacking)


def _alike(a: str, b: str) -> bool:
    """Tell whether two arguments say the same: `(2, 2)` is 2, and numbers may be rounded."""
    sides = [sorted({part.strip() for part in text.strip("()[]").split(",") if part.strip()}) for text in (a, b)]
    if all(len(side) == 1 for side in sides):
        return same(sides[0][0], sides[1][0]) or close(sides[0][0], sides[1][0])
    return a.strip("()[]") == b.strip("()[]")


def _align_optimizers(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Add to classes how they calculate otherwise, make rates that are rounded otherwise equal; return what is to be noted."""
    formulas = [_formula(values) for values in (a, b)]
    notes: list[str] = []
    for side, values, mine, theirs in ((BENCH, a, *formulas), (CMP, b, *formulas[::-1])):
        if mine is None:
            notes.append(f"how {values.get('class')} in {side} calculates is not known: its formula was not compared")
        elif theirs is not None and mine.get("bias_correction") is False and theirs.get("bias_correction"):
            values["class"] = f"{values['class']} (without bias correction)"
    first, second = ((formula or {}).get("weight_decay") for formula in formulas)
    decays = any(values.get("group0.weight_decay") for values in (a, b))
    if first and second and first != second and decays and a.get("class") == b.get("class"):
        a["class"], b["class"] = (f"{x['class']} (weight decay is {decay})" for x, decay in ((a, first), (b, second)))
    places = [(formula or {}).get("eps") for formula in formulas]
    if all(places) and places[0] != places[1]:
        notes.append(
            f"{a.get('class')} adds eps {places[0]} in {BENCH} and {places[1]} in {CMP}: where gradients are not much larger, "
            "steps differ"
        )
    _align_decay(a, b)
    rates = [values.get("lr_by_step") for values in (a, b)]
    if not all(rates):
        for values in (a, b):
            values.pop("lr_by_step", None)
        lacking = [side for side, held in ((BENCH, rates[0]), (CMP, rates[1])) if not held]
        return [*notes, f"learning rates of each step are not in {' nor '.join(lacking)}: not compared"]
    for i, (x, y) in enumerate(zip(*rates, strict=False)):
        if len(x) == len(y) and all(close(p, q, _SAME_RATE) for p, q in zip(x, y, strict=True)):
            b["lr_by_step"][i] = x
    return notes


def _align_decay(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Say of which parameters weight decay differs where both optimizers decay: MindSpore spares `gamma` and `beta`."""
    sides: list[tuple[list[str], set[str]]] = []
    for values in (a, b):
        spared, names, decayed = set(values.pop("without_decay", ())), list[str](), set[str]()
        for key in [key for key in values if key.endswith(".parameters")]:
            names += values[key]
            decayed |= set(values[key]) - spared if values.get(f"{key.rpartition('.')[0]}.weight_decay") else set()
        sides.append((names, decayed))
    (names, mine), (others, theirs) = sides
    apart = [name for name in names if name in others and (name in mine) != (name in theirs)]
    if mine and theirs and apart:
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        for values, decayed in ((a, mine), (b, theirs)):
            values[f"weight decay of {apart[0]}{more}"] = "applied" if apart[0] in decayed else "not applied"


def _formula(values: dict[str, Any]) -> Mapping[str, Any] | None:
    """Take the formula out of the settings of an optimizer, or return that of torch's class; None if nothing is known."""
    told = {key.partition(".")[2]: values.pop(key) for key in [*values] if key.startswith("formula.")}
    name = str(values.get("class"))
    if values.pop("formula", None) is not None:
        return None
    if told:
        return told
    return _IN_OLDER_PACKS.get(name) or _FORMULAS.get(name, {})


def as_notes(check: Check) -> Check:
    """Return a check whose findings say what differs between frameworks by nature, as notes."""
    if check.name not in BY_NATURE:
        return check
    return replace(check, findings=tuple(replace(finding, level="note", suspect=False) for finding in check.findings))


def across(bench: str, cmp: str) -> str:
    """Return the note that says how a comparison across frameworks was made."""
    unjudged = ", ".join(BY_NATURE.values())
    return f"bench is of {bench} and cmp of {cmp}: names were put into PyTorch's words; not judged: {unjudged}"


def _rank(rank: RankPack) -> RankPack:
    single = dict(rank.single)
    if "hyperparameters" in single:
        content = dict(single["hyperparameters"])
        content["sources"] = [_source(one) for one in content.get("sources", [])]
        content.pop("model_state", None)
        single["hyperparameters"] = content
    by_micro = dict(rank.by_micro)
    if "dataset" in by_micro:
        by_micro["dataset"] = {n: _tensors(content, "tensors", _whole) for n, content in by_micro["dataset"].items()}
    if "weights" in by_micro:
        by_micro["weights"] = {n: _tensors(content, "parameters", dict) for n, content in by_micro["weights"].items()}
    return replace(rank, single=single, by_micro=by_micro)


def _source(one: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(one.get("values", {}))
    if one.get("kind") == "model":
        values = {name: _module(str(setting)) for name, setting in values.items()}
    elif one.get("kind") == "clipping":
        values.pop("error_if_nonfinite", None)
    elif one.get("kind") == "optimizer":
        groups = [key.partition(".")[0] for key in values if key.endswith(".parameters")] or ["group0"]
        if all(beta in values for beta in _BETAS):
            betas = [values.pop(beta) for beta in _BETAS]
            values |= {f"{group}.betas": betas for group in groups}
        values = {name: value for key, setting in values.items() for name, value in _of_optimizer(key, setting, groups)}
    return {**one, "values": values}


def _module(text: str) -> str:
    """Return class and settings of a module as torch calls them; `4, 8` of settings without a name says its shape."""
    cell, arguments = class_and_arguments(text)
    name = _class(cell)
    names = _ARGUMENTS | _ARGUMENTS_OF.get(name, {})
    told = {names.get(key, key): value.strip("'") for key, value in arguments.items() if not key.isdecimal()}
    return text_of(name, {key: value for key, value in told.items() if key not in _OTHER_NUMBERS})


def _class(name: str) -> str:
    return _CLASSES.get(name, name)


def _of_optimizer(key: str, value: Any, groups: Sequence[str]) -> list[tuple[str, Any]]:
    """Return a number of an optimizer by torch's name, or nothing for what changes nothing or has no counterpart.

    groups: those that torch keeps numbers for, which MindSpore has once.
    """
    last = key.rpartition(".")[2]
    if key == "class":
        return [(key, _class(str(value)))]
    if last in ("parameters", "without_decay"):
        return [(key, [torch_parameter(str(name)) for name in value])]
    if last in _OF_TORCH:
        return []
    if key == "lr_by_step":
        return [(key, [list(dict.fromkeys(rates)) for rates in value])]
    if last in _CHANGES_NOTHING and (value is None or meaning(value) == meaning(_CHANGES_NOTHING[last])):
        return []
    return [(f"{group}.{key}", value) for group in groups] if key in _OF_GROUPS else [(key, value)]


def _tensors(content: Mapping[str, Any], key: str, entry: Any) -> dict[str, Any]:
    return {**content, key: {torch_parameter(name): entry(setting) for name, setting in content.get(key, {}).items()}}


def _whole(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tensor of whole numbers as of int64, which one framework takes, where the other takes int32."""
    if "int" not in str(entry.get("dtype")):
        return dict(entry)
    return {
        **entry,
        **{name: entry[f"{name}_int64"] for name in ("checksum", "samples") if f"{name}_int64" in entry},
        "dtype": "int64",
    }
