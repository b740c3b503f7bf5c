"""The `config.json` of the dumps, with that tool's defaults.

Its keys are flat, plus one section named by `task`. Its defaults differ from a plan's: level L1, ops that only move data left
out (risk_level FOCUS), one `.pt` file a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trainprobe.engine.plan.legacy.translation import Translation, literal
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import did_you_mean

_COMMON = {
    *("task", "dump_path", "rank", "step", "level", "async_dump", "dump_enable", "extra_info", "precision", "risk_level"),
    *("custom_op_namespaces", "load", "seed", "is_deterministic", "enable_dataloader"),
}
_SELECTING = {"scope", "list", "data_mode"}
_ONLINE = ("online_run_ut", "online_run_ut_recompute", "nfs_path", "tls_path", "host", "port")
_SECTIONS = {
    "statistics": _SELECTING | {"tensor_list", "summary_mode", "slice", "request_id", "device", "precision"},
    "tensor": _SELECTING
    | {"tensor_list", "summary_mode", "slice", "request_id", "bench_path", "diff_nums", "file_format", "device", *_ONLINE},
    "nan_check": _SELECTING | {"tensor_list"},
    "structure": _SELECTING,
}
_RERUN = "inputs and outputs of ops are recorded, as with task tensor: `trainprobe op-check DUMP` judges them"
# tasks that a plan does not have → the task that records most of the same, and what is different then
_TRANSLATED = {
    "acc_check": ("tensor", _RERUN),
    "run_ut": ("tensor", _RERUN),
    "diff_check": ("tensor", "nothing is compared while training: record both runs, then `trainprobe dump-compare`"),
    "overflow_check": ("nan_check", "NaN and infinities are counted in every value; the device's overflow flag is not read"),
    "exception_dump": (
        "statistics",
        "every step is recorded, not only one that ends in an error: `black_box: true` in a plan does that",
    ),
    "grad_probe": (
        "off",
        "the monitor watches the gradients (see docs/monitor.md): norm, max and min stand in grad_reduced files instead of "
        "grad_summary files, and signs of gradients are not written",
    ),
    "free_benchmark": (
        "off",
        "the operators of a step are run again with perturbed inputs after it, and the training goes on with its own results "
        "(`op_check.condition` of a plan, docs/op_check.md); without `step` step 0 alone",
    ),
}
_APART = (
    "not used: `trainprobe op-check serve` judges on another machine while the training runs, and the plan's "
    "`op_check: {server: HOST:PORT}` sends it the calls (docs/op_check_online.md)"
)
# keys of their sections that nothing here takes over, and what there is to say
_UNUSED = {
    "black_list": "not used: every op is recorded; white_list or list names those to record",
    "error_data_path": "not used: nothing is run again; what is recorded goes to dump_path",
    "overflow_nums": "not used: recording does not end by itself; `step` says which steps are recorded",
    "check_mode": "not used: the device's overflow flag is not read",
    **dict.fromkeys(("is_online", *_ONLINE), _APART),
    "rank_list": "not used: `rank` says which ranks are recorded",
    "grad_level": "not used: the monitor's statistics are recorded (docs/monitor.md)",
    "bounds": "not used: `histogram` in a plan counts between edges",
    "diff_nums": "not used: recording does not end by itself",
    "bench_path": "not compared while training: record both runs, then `trainprobe dump-compare`",
    **dict.fromkeys(
        ("fuzz_device", "fuzz_level", "fuzz_stage"),
        "not used: forward and backward are run again on the device that they ran on",
    ),
    **dict.fromkeys(
        ("if_preheat", "preheat_step", "max_sample"),
        "not used: how much a result changes is written, and no threshold is learnt",
    ),
}
_TELLING = (_COMMON | _SECTIONS.keys() | _TRANSLATED.keys()) - {"task", "rank", "step", "level", "statistics"}
_STATISTICS = {
    **{name: name for name in ("max", "min", "mean")},
    **{"l2norm": "norm", "nan count": "nan", "zero count": "zero", "negative zero count": "zero"},
    **{"positive inf count": "inf", "negative inf count": "inf", "subnormal count": "sublow"},
}
_OP_PREFIXES = (
    *("Functional.", "Tensor.", "Torch.", "VF.", "Aten.", "NPU.", "Distributed.", "MindSpeed.", "Primitive.", "Mint."),
    *("MintFunctional.", "MintDistributed.", "Jit."),
)


def is_dialect(fields: Mapping[str, Any]) -> bool:
    """Tell whether these keys are that tool's and none of them a plan's alone."""
    sectioned = isinstance(fields.get("statistics"), Mapping)
    own = set(Plan.model_fields) - _COMMON - _SECTIONS.keys()
    return (sectioned or bool(_TELLING & fields.keys())) and not own & fields.keys()


def translate(config: Mapping[str, Any], origin: str, framework: str = "pytorch") -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of a plan and the notes; PlanError names what cannot be carried over."""
    out = Translation(origin)
    out.check_keys(config, _COMMON | _SECTIONS.keys() | _TRANSLATED.keys(), "")
    asked = task = config.get("task") or "statistics"
    if asked in _TRANSLATED:
        task, difference = _TRANSLATED[asked]
        out.note("task", f"{asked!r}: {difference}")
    if task not in _SECTIONS and task != "off":
        known = [*_SECTIONS, *_TRANSLATED]
        raise out.refuse("task", f"{task!r} is not a task{did_you_mean(str(task), known)} (there are: {', '.join(known)})")
    section = out.section(config.get(asked), asked)
    if task != asked:
        section = _section_of_another(out, section, asked, task)
    _common(out, config, task, framework)
    if task == "off":
        if asked == "free_benchmark":
            out.fields |= {"level": "off", "op_check": _free_benchmark(out, config)}
            return out.fields, tuple(out.notes)
        out.fields |= {"level": "off", "monitor": _grad_probe(out, config)} if asked == "grad_probe" else {"level": "off"}
        return out.fields, tuple(out.notes)
    out.check_keys(section, _SECTIONS[task], f"{task}.")
    _task(out, section, task)
    _selection(out, section, task)
    return out.fields, tuple(out.notes)


def _section_of_another(out: Translation, section: Mapping[str, Any], asked: str, task: str) -> dict[str, Any]:
    """Return what of the section of a task that a plan does not have its replacement takes over; say what it does not."""
    taken = _SELECTING | {"tensor_list", "white_list", "param_list"}
    own = {"pert_mode", "handler_type"} if asked == "free_benchmark" else set[str]()
    out.check_keys(section, taken | own | _UNUSED.keys(), f"{asked}.")
    for key in (key for key, value in section.items() if value not in (None, [], False)):
        if key in _UNUSED:
            out.note(f"{asked}.{key}", _UNUSED[key])
        elif asked == "free_benchmark" and key in ("list", "pert_mode", "handler_type"):
            continue
        elif task == "off" and key in _SELECTING:
            out.note(f"{asked}.{key}", "not used: nothing is recorded")
    renamed = {"list" if key == "white_list" else key: value for key, value in section.items()}
    return {key: value for key, value in renamed.items() if key in _SECTIONS.get(task, ())}


_PERTURBATIONS = {
    "improve_precision": "precision",
    "add_noise": "noise",
    "bit_noise": "last-bit",
    "change_value": "swap",
    "exchange_value": "swap",
    "no_change": "nothing",
}


def _free_benchmark(out: Translation, config: Mapping[str, Any]) -> dict[str, Any] | bool:
    """Return the section op_check that stands for a section free_benchmark."""
    given: Any = config.get("free_benchmark")
    section = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}
    mode = section.get("pert_mode") or "improve_precision"
    if mode == "to_cpu":
        out.note("free_benchmark.pert_mode", "'to_cpu': each operator is judged against a reference on the CPU")
    elif mode not in _PERTURBATIONS:
        raise out.refuse("free_benchmark.pert_mode", f"{mode!r} is not known{did_you_mean(str(mode), [*_PERTURBATIONS])}")
    if section.get("handler_type") == "fix":
        text = "'fix': nothing is put in place of a result; "
        text += "trainprobe.op_check.improve.HigherPrecision does that, and changes the training"
        out.note("free_benchmark.handler_type", text)
    found: dict[str, Any] = {} if mode == "to_cpu" else {"condition": _PERTURBATIONS[mode]}
    found |= {key: config[key] for key in ("step", "rank") if config.get(key) not in (None, [])}
    found |= {"ops": section["list"]} if section.get("list") else {}
    return found or True


def _common(out: Translation, config: Mapping[str, Any], task: str, framework: str) -> None:
    fields = out.fields
    level = config.get("level") or "L1"
    if level == "L2":
        raise out.refuse(
            "level",
            "'L2' (kernel dumps) is what MindSpore itself writes, with the settings that `trainprobe kernel-dump configure` "
            "makes of this file; here choose L0, L1 or mix",
        )
    fields["level"] = level
    if config.get("dump_path"):
        fields["output"] = config["dump_path"]
    for key in ("step", "rank"):
        if config.get(key) not in (None, []):
            fields[key] = config[key]
    scope = _one_of(out, config, "risk_level", {"ALL": "all", "CORE": "core", "FOCUS": "focus"}, "FOCUS")
    if framework == "pytorch":
        fields["ops_scope"] = scope
    elif scope != "all" and config.get("risk_level"):
        out.note("risk_level", "not used under MindSpore, as in that tool: every operator is recorded")
    if config.get("extra_info") is not None:
        fields["stacks"] = fields["construct"] = config["extra_info"]
    if config.get("dump_enable") is False:
        fields["level"] = "off"  # PrecisionDebugger watches the key, and hands over true
        out.note("dump_enable", "false: nothing is recorded; only PrecisionDebugger looks at this key while the training runs")
    if task == "tensor":
        fields["tensor_format"] = "pt" if framework == "pytorch" else "npy"
    _about_the_training(out, config, framework)


def _about_the_training(out: Translation, config: Mapping[str, Any], framework: str) -> None:
    """Say what becomes of keys that change the training, or need no counterpart."""
    if config.get("custom_op_namespaces"):
        out.note("custom_op_namespaces", "every registered op is recorded, whatever its namespace")
    if config.get("load"):
        raise out.refuse("load", "replaying recorded inputs changes the training, which a plan never does: remove the section")
    if config.get("seed") is not None or config.get("is_deterministic"):
        seed = config.get("seed") if config.get("seed") is not None else 1234
        call = f"seed_all(seed={seed!r}, mode={bool(config.get('is_deterministic'))})"
        out.note("seed", f"a plan changes nothing in the training: call `from trainprobe.{framework} import seed_all; {call}`")
    if config.get("enable_dataloader"):
        out.note("enable_dataloader", "steps are not taken from the DataLoader: call start(), stop() and step() in the loop")


def _grad_probe(out: Translation, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the monitor that watches what a grad_probe section names."""
    section = config.get("grad_probe")
    names = cast("Mapping[str, Any]", section).get("param_list") if isinstance(section, Mapping) else None
    chosen = [f"**{literal(name)}**" for name in out.texts(names, "grad_probe.param_list")] if names else ["**"]
    out.fields |= {"sinks": ["parquet", "msprobe_csv"], "statistics": ("norm", "max", "min")}
    return {"gradients": {"names": chosen}, "parameters": False, "activations": False}


def _task(out: Translation, section: Mapping[str, Any], task: str) -> None:
    fields = out.fields
    fields["task"] = "tensor" if task == "tensor" else "statistics"
    if task == "structure":
        fields["statistics"], fields["construct"] = (), True
        if fields["level"] not in {"L0", "mix", "off"}:
            out.note("level", f"{fields['level']!r} has no structure of modules: mix is used")
            fields["level"] = "mix"
    if task == "nan_check":
        fields["statistics"] = ("max", "min", "mean", "norm", "nan", "inf")
        out.note("task", "nan_check counts NaN and infinities in every value, and does not read the device's overflow flag")
    for key in ("bench_path", "diff_nums", *_ONLINE):
        if section.get(key) and task == "tensor":
            out.note(f"tensor.{key}", _UNUSED[key])
    if section.get("request_id"):
        out.note(f"{task}.request_id", "requests of an inference server are not told apart; every request is recorded")
    if section.get("file_format") in {"npy", "pt"}:
        fields["tensor_format"] = section["file_format"]
    if section.get("slice"):
        fields["slice"] = [_slice(out, cut, f"{task}.slice[{i}]") for i, cut in enumerate(section["slice"]) if cut]
    if section.get("summary_mode") is not None:
        _summary(out, section["summary_mode"], f"{task}.summary_mode")


def _summary(out: Translation, mode: object, key: str) -> None:
    single = {"statistics": "statistics", "md5": "statistics_and_md5", "xor": "checksum", "hash": "checksum"}
    if mode == "xor":
        out.note(key, "'xor' becomes the 64-bit checksum, which also sees two values swapped; the two cannot be compared")
    if isinstance(mode, str):
        if mode not in single:
            raise out.refuse(key, f"{mode!r} is not a summary{did_you_mean(mode, list(single))}")
        out.fields["summary"] = single[mode]
        return
    names = [str(name) for name in cast("Sequence[object]", mode)] if isinstance(mode, (list, tuple)) else [repr(mode)]
    for name in names:
        if name not in _STATISTICS and name not in {"hash", "md5", "statistics"}:
            raise out.refuse(key, f"{name!r} is not a statistic{did_you_mean(name, [*_STATISTICS, 'hash', 'md5'])}")
    wanted = tuple(dict.fromkeys(_STATISTICS[name] for name in names if name in _STATISTICS))
    if wanted:
        out.fields["statistics"] = wanted
    if {"hash", "md5"} & set(names):
        summaries = ("checksum", "both") if "hash" in names else ("md5", "statistics_and_md5")
        out.fields["summary"] = summaries[bool(wanted) or "statistics" in names]
    merged = sorted({name for name in names if "inf count" in name or "zero count" in name})
    if len(merged) > 1 or "negative zero count" in names:
        out.note(key, f"{', '.join(merged)}: counted together, as inf and zero")


def _slice(out: Translation, cut: object, key: str) -> dict[str, Any]:
    if not isinstance(cut, Mapping):
        raise out.refuse(key, f"{cut!r} cannot be used: expected a section with dim, begin, end and size")
    given = cast("Mapping[str, Any]", cut)
    out.check_keys(given, {"dim", "begin", "end", "size"}, f"{key}.")
    names = {"dim": "dim", "begin": "begin", "end": "end", "size": "length"}
    return {"dim": 0} | {names[k]: given[k] for k in names if given.get(k) is not None}


def _selection(out: Translation, section: Mapping[str, Any], task: str) -> None:
    if section.get("scope"):
        out.fields["scope"] = section["scope"]
    if section.get("data_mode"):
        _data_mode(out, section["data_mode"], f"{task}.data_mode")
    if names := section.get("list"):
        _list(out, out.texts(names, f"{task}.list"), f"{task}.list", whole=bool(section.get("scope")))
    if names := section.get("tensor_list"):
        key = f"{task}.tensor_list"
        if task == "tensor":
            out.note(key, "not used, as there: the values of all that is selected are stored")
            return
        out.fields["tensor_entries"] = [_saved(out, name, key) for name in out.texts(names, key)]


def _data_mode(out: Translation, modes: object, key: str) -> None:
    given = set(out.texts(modes, key))
    known = ["all", "forward", "backward", "input", "output"]
    for mode in sorted(given - set(known)):
        raise out.refuse(key, f"{mode!r} is not a mode{did_you_mean(mode, known)} (there are: {', '.join(known)})")
    if "all" in given:
        return
    phases = given & {"forward", "backward"} or {"forward", "backward"}
    sides = given & {"input", "output"} or {"input", "output"}
    if len(phases) == 1:
        out.fields["phases"] = sorted(phases)
    if len(sides) == 1:
        out.fields["entry_sides"] = sorted(sides)
    data = ["input", "kwargs", "output", *(["parameters"] if "forward" in phases else [])]
    out.fields["data"] = data + (["parameter_gradients"] if "backward" in phases else [])


# collectives as that tool calls them → as they are recorded here, by what runs
_COLLECTIVES = {
    **{"isend": ("send",), "irecv": ("recv",), "batch_isend_irecv": ("send", "recv"), "distributed": ("Distributed",)},
    **{"_reduce_scatter_base": ("reduce_scatter_tensor",), "_all_gather_base": ("all_gather_into_tensor",)},
}


def _recorded_as(out: Translation, name: str, key: str) -> list[str]:
    """Return the names that a name of a list has here, and say so where they are others."""
    bare = name.removeprefix("Distributed.").partition(".")[0]
    if bare not in _COLLECTIVES:
        return [name]
    found = [name.replace(bare, other, 1) for other in _COLLECTIVES[bare]]
    out.note(key, f"{name!r}: recorded as {' and '.join(found)}")
    return found


def _list(out: Translation, names: list[str], key: str, whole: bool) -> None:
    """Select by the full names of calls, as that tool does; ops and modules that cannot match are not looked at.

    whole: they are, since a scope begins and ends at any of them.
    """
    names = [here for name in names for here in _recorded_as(out, name, key)]
    out.fields["entries"] = names
    level = "" if whole else out.fields["level"]
    if level == "L1" and all(possible := [_possible_op(name) for name in names]):
        out.fields["ops"] = possible
    if level == "L0" and all(possible := [_possible_module(name) for name in names]):
        out.fields["modules"] = possible
    if any(name.startswith("name-regex(") for name in names):
        out.note(key, "name-regex(…) is for the graph mode of MindSpore, and matches nothing here: write a part of the names")


def _possible_op(name: str) -> str:
    """Return a pattern of all ops of which a call's full name may contain this text, or "" where that is not known."""
    if match := re.fullmatch(r"(.+)\.\d+(?:\.(?:forward|backward))?", name):
        return literal(match[1]) if name.startswith(_OP_PREFIXES) else ""
    return f"**{literal(name)}**" if name not in "forward backward" and "." not in name and not name.isdigit() else ""


def _possible_module(name: str) -> str:
    """Return the pattern of the one module that a full name is of, or "" for a part of a name."""
    match = re.fullmatch(r"(?:Module|Cell)\.(.+)\.\w+\.(?:forward|backward)(?:\.\d+)?", name)
    return literal(match[1]) if match else ""


def _saved(out: Translation, name: str, key: str) -> str:
    """Return the part of full names that an entry of a tensor_list means, without its number and forward or backward."""
    text = re.sub(r"^Cell(?=\.)", "Module", name)
    match = re.fullmatch(r"(.*?)\.?(?:\d+\.)?(?:forward|backward)(?:\.\d+)?", text)
    if match is None and text.startswith(_OP_PREFIXES):
        match = re.fullmatch(r"(.+)\.\d+", text)
    if match is None:
        return text
    out.note(key, f"{name!r}: the values of all calls of {match[1] or 'everything'}, forward and backward, are saved")
    return f"{match[1]}."


def _one_of(out: Translation, config: Mapping[str, Any], key: str, choices: Mapping[str, str], default: str) -> str:
    value = config.get(key) or default
    if value not in choices:
        raise out.refuse(
            key, f"{value!r} cannot be used: expected one of {', '.join(choices)}{did_you_mean(str(value), [*choices])}"
        )
    return choices[value]
