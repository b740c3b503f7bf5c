"""A run of PyTorch held against one of MindSpore: both are put into PyTorch's words, and what differs by nature is a note."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainprobe.config_check.compare.values import meaning
from trainprobe.config_check.compare.verdicts import Check
from trainprobe.config_check.pack import Pack, RankPack

# class of mindspore.nn → that of torch.nn or torch.optim which calculates the same
_CLASSES = {
    **{"Dense": "Linear", "CellList": "ModuleList", "SequentialCell": "Sequential", "CellDict": "ModuleDict"},
    **{"RmsNorm": "RMSNorm", "Conv2dTranspose": "ConvTranspose2d"},
    **{"AdamWeightDecay": "AdamW", "Momentum": "SGD"},
}
# last part of a parameter's name
_PARAMETERS = {
    **{"gamma": "weight", "beta": "bias", "embedding_table": "weight"},
    **{"moving_mean": "running_mean", "moving_variance": "running_var"},
}
_OF_GROUPS = ("momentum", "weight_decay", "eps", "nesterov")  # what an optimizer of torch keeps for each group
_BETAS = ("beta1", "beta2")
# numbers of an optimizer that one framework alone has, where they change nothing
_CHANGES_NOTHING = {"loss_scale": 1.0, "dampening": 0, "amsgrad": False, "nesterov": False}
_OF_TORCH = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
BY_NATURE = {
    "environment": "environment variables, which are each framework's own",
    "packages": "packages, which are each framework's own",
    "randomness": "random calls, which MindSpore does not show",
}


def framework_of(pack: Pack) -> str:
    """Return "mindspore" or "torch"."""
    names = [rank.single.get("hyperparameters", {}).get("framework") for rank in pack.ranks.values()]
    return next((str(one) for one in names if one), "torch")


def in_common_words(pack: Pack) -> Pack:
    """Return a pack with classes, parameters and numbers of optimizers by PyTorch's names, and without what is its default."""
    return replace(pack, ranks={number: _rank(rank) for number, rank in pack.ranks.items()})


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
        values = {name: _class(str(setting).partition("(")[0]) for name, setting in values.items()}
    elif one.get("kind") == "optimizer":
        if all(beta in values for beta in _BETAS):
            values["group0.betas"] = [values.pop(beta) for beta in _BETAS]
        values = {name: value for key, setting in values.items() for name, value in _of_optimizer(key, setting)}
    return {**one, "values": values}


def _class(name: str) -> str:
    return _CLASSES.get(name, name)


def _of_optimizer(key: str, value: Any) -> list[tuple[str, Any]]:
    """Return a number of an optimizer by torch's name, or nothing for what changes nothing or has no counterpart."""
    last = key.rpartition(".")[2]
    if key == "class":
        return [(key, _class(str(value)))]
    if last == "parameters":
        return [(key, [_parameter(str(name)) for name in value])]
    if last in _OF_TORCH or key == "lr_by_step":
        return []
    if last in _CHANGES_NOTHING and (value is None or meaning(value) == meaning(_CHANGES_NOTHING[last])):
        return []
    return [(f"group0.{key}" if key in _OF_GROUPS else key, value)]


def _parameter(name: str) -> str:
    before, dot, last = name.rpartition(".")
    return f"{before}{dot}{_PARAMETERS.get(last, last)}"


def _tensors(content: Mapping[str, Any], key: str, entry: Any) -> dict[str, Any]:
    return {**content, key: {_parameter(name): entry(setting) for name, setting in content.get(key, {}).items()}}


def _whole(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tensor of whole numbers as of int64, which one framework takes, where the other takes int32."""
    if "int" not in str(entry.get("dtype")):
        return dict(entry)
    return {
        **entry,
        **{name: entry[f"{name}_int64"] for name in ("checksum", "samples") if f"{name}_int64" in entry},
        "dtype": "int64",
    }
