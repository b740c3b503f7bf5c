"""Every key and call that the documentation of mindstudio-probe names: its releases 1.3.0 and 8.1.1 carry it in their wheels.

Each key is accepted and changes the plan, or a sentence says what is different; each stands in docs/migration.md.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainprobe.pytorch
from tests.interop.peer import OLDER, PEER, needs_older
from trainprobe.cli import VERBS
from trainprobe.engine.plan.legacy import translate
from trainprobe.errors import PlanError

pytestmark = needs_older
PAGE = (Path(__file__).resolve().parents[2] / "docs/migration.md").read_text(encoding="utf-8")
COMMON = "common"
VALUES: dict[str, Any] = {
    **{"task": "tensor", "dump_path": "other", "rank": [1], "step": [3], "level": "mix", "enable_dataloader": True},
    **{"scope": ["Functional.a.0.forward", "Functional.b.0.forward"], "list": ["relu"], "tensor_list": ["relu"]},
    **{"data_mode": ["forward"], "summary_mode": "md5", "white_list": ["conv1d"], "black_list": ["conv1d"]},
    **{"file_format": "npy", "param_list": ["head"], "grad_level": "L0", "bounds": [0, 1], "overflow_nums": 3},
    **{"rank_list": [1], "host": "10.0.0.1", "port": 1234, "preheat_step": 3, "max_sample": 3, "async_dump": True},
    **{"is_online": True, "online_run_ut": True, "if_preheat": True, "precision": "low", "device": "device"},
    **{"pert_mode": "bit_noise", "handler_type": "fix"},
}
# nothing to carry over: what is recorded is what such a file asks for, or it chooses the speed of the same numbers
NEEDLESS = {"async_dump", "precision", "device"}


def pages(pattern: str) -> Iterator[str]:
    """Yield pages of the documentation of both releases."""
    for python in OLDER.values():
        for path in Path(python).parents[1].glob(f"lib/python3*/site-packages/msprobe/docs/{pattern}"):
            yield path.read_text(encoding="utf-8")


def documented_keys() -> set[tuple[str, str]]:
    """Return (task or "common", key) of config.json."""
    found: set[tuple[str, str]] = set()
    for page in pages("02.config_introduction.md"):
        section = ""
        for line in page.splitlines():
            if line.startswith("#"):
                task = re.search(r"task 配置为 (\w+)", line)
                section = task[1] if task else COMMON if "通用配置" in line else ""
            cell = re.match(r"\s*(?:\||<tr><td[^>]*>)\s*([a-z_]+)(?:<sup>\w+</sup>)?\s*(?:\||</td>)", line)
            if section and cell:
                found.add((section, cell[1]))
    everywhere = {key for section, key in found if section == COMMON}
    return {(COMMON if key in everywhere else section, key) for section, key in found}


def test_each_documented_key_is_accepted_or_has_a_sentence_and_stands_in_the_docs():
    keys = documented_keys()
    assert len(keys) >= 46 and {(COMMON, "enable_dataloader"), ("run_ut", "white_list"), ("statistics", "tensor_list")} <= keys
    silent = []
    for task, key in sorted(keys):
        value = VALUES.get(key, "x")
        before: dict[str, Any] = {"dump_path": "d", **({"task": task, task: {}} if task != COMMON else {})}
        after = {**before, key: value} if task == COMMON or key in before else {**before, task: {key: value}}
        (fields, notes), (plain, told) = translate(after, "config.json"), translate(before, "config.json")
        assert not any("unknown key" in note for note in notes), (task, key, notes)
        if fields == plain and notes == told and key not in NEEDLESS and (task, value) != (key, key):
            silent.append((task, key))
        assert f"`{key}`" in PAGE, f"docs/migration.md does not name {key}"
    assert not silent


@pytest.mark.parametrize("python", [*OLDER.values(), PEER])
def test_the_file_that_each_release_ships_is_accepted_with_each_of_its_tasks(python: str):
    (path,) = Path(python).parents[1].glob("lib/python3*/site-packages/msprobe/config.json")
    shipped = json.loads(path.read_text())
    for task in shipped.keys() & {
        "statistics",
        "tensor",
        "run_ut",
        "acc_check",
        "overflow_check",
        "grad_probe",
        "free_benchmark",
    }:
        _, notes = translate({**shipped, "task": task}, "config.json")
        assert not any("unknown key" in note for note in notes), (task, notes)


def documented_calls() -> set[tuple[str, tuple[str, ...]]]:
    """Return (name, parameters) of each prototype in the pages about dumps."""
    found: set[tuple[str, tuple[str, ...]]] = set()
    for pattern in ("05.data_dump_PyTorch.md", "28.debugger_save_instruction.md"):
        for page in pages(pattern):
            for block in re.findall(r"原型\*\*：?\s*```[Pp]ython\s+(.*?)```", page, re.DOTALL):
                for name, parameters in re.findall(r"(\w+)\(([^)]*)\)", block):
                    found.add((name, tuple(p.partition("=")[0].strip() for p in parameters.split(",") if p.strip())))
    return found


def test_each_documented_call_takes_the_parameters_that_it_has_there():
    calls = documented_calls()
    assert {"PrecisionDebugger", "start", "seed_all", "module_dump", "save"} <= {name for name, _ in calls}, calls
    for name, parameters in calls:
        where = trainprobe.pytorch if hasattr(trainprobe.pytorch, name) else trainprobe.pytorch.PrecisionDebugger
        call = getattr(where, name)
        known = inspect.signature(call.__init__ if inspect.isclass(call) else call).parameters
        assert set(parameters) <= known.keys(), (name, parameters, list(known))
        assert f"`{name}" in PAGE or f"{name}(" in PAGE, f"docs/migration.md does not name {name}"


def test_what_is_refused_says_what_replaces_it():
    with pytest.raises(PlanError, match="choose L0, L1 or mix"):
        translate({"dump_path": "d", "level": "L2"}, "config.json")


def monitor_keys() -> set[str]:
    """Return the keys of the monitor's JSON; those of a target's values stand among them."""
    cells = (re.findall(r'(?m)^\| *"([a-z_]+)" *\|', page) for page in pages("19.monitor.md"))
    return {key for found in cells for key in found}


def test_each_documented_key_of_the_monitor_is_accepted_and_stands_in_the_docs():
    inner = {"input", "output", "input_grad", "output_grad"}
    keys = monitor_keys()
    assert len(keys) >= 25 and inner | {"targets", "squash_name", "cc_distribution", "monitor_mbs_grad"} <= keys
    given: dict[str, Any] = {"targets": {"head": dict.fromkeys(inner, "tuple[1]:0")}, "alert": {}, "cc_distribution": {}}
    given |= {"ops": ["norm"], "format": "csv", "module_ranks": [0], "append_output": [], "eps": 1e-8, "ndigits": 6}
    given |= {"collect_times": 3, "start_step": 1, "step_interval": 2, "step_count_per_record": 1, "l2_targets": {}}
    for key in keys - inner:
        _, notes = translate({"targets": {}, key: given.get(key, True)}, "monitor_config.json")
        assert not any("unknown key" in note for note in notes), (key, notes)
    assert not [key for key in keys if f"`{key}`" not in PAGE and f'`"{key}"' not in PAGE]


def documented_parameters() -> set[str]:
    """Return the keywords of the comparisons, their JSON, and of the conversion of CSV files."""
    found: set[str] = set()
    for page in pages("10.accuracy_compare_PyTorch.md"):
        tables = re.findall(r"(?m)^\| *参数.*\n\|[-| :]+\n((?:\|.*\n)+)", page)
        found |= {cell for table in tables for cell in re.findall(r"(?m)^\| *([a-z_]{4,}) *\|", table)}
    for page in pages("19.monitor.md"):
        found |= set(re.findall(r"(?m)^    (\w+)=", re.findall(r"csv2tensorboard_by_step\(\n(.*?)\)", page, re.DOTALL)[0]))
    return found


def test_each_documented_parameter_of_comparisons_and_conversions_stands_in_the_docs():
    parameters = documented_parameters()
    assert {"npu_path", "npu_dump_dir", "auto_analyze", "fuzzy_match", "data_type_list", "process_num"} <= parameters
    of_merge_result = {"api", "compare_index"}
    assert not [name for name in parameters - of_merge_result if f"`{name}" not in PAGE and f"{name}," not in PAGE]


def documented_commands() -> set[str]:
    """Return the commands that the pages of 1.3.0 and 8.1.1 show, and those of the parser of 26.2.0."""
    found = {name for page in pages("**/*.md") for name in re.findall(r"msprobe (?:-f|--framework) [\w/]+ (\w+)", page)}
    assert PEER is not None
    (source,) = Path(PEER).parents[1].glob("lib/python3*/site-packages/msprobe/msprobe.py")
    return found | set(re.findall(r"add_parser\('(\w+)'\)", source.read_text(encoding="utf-8")))


def test_each_documented_command_has_a_row_whose_commands_exist():
    commands = documented_commands()
    assert {"compare", "run_ut", "nan_analyze", "graph_visualize", "data2db", "code_mapping"} <= commands
    section = PAGE.partition("\n## Commands\n")[2]
    assert not [name for name in commands if f"`{name}`" not in section]
    named = re.findall(r"`trainprobe ([\w-]+(?: serve| classic)?)", " ".join(PAGE.split()))
    assert len(named) > 20 and not [verb for verb in named if verb not in VERBS]


def test_what_each_release_exports_can_be_imported_or_says_what_replaces_it():
    for python in (*OLDER.values(), PEER):
        assert python is not None
        (package,) = Path(python).parents[1].glob("lib/python3*/site-packages/msprobe")
        for inner in ("pytorch", "core"):
            source = (package / inner / "__init__.py").read_text(encoding="utf-8")
            lines = re.findall(r"(?m)^ *from [.\w]+ import ([\w, ]+?)(?: *#.*)?$", source)
            for name in (name.strip() for line in lines for name in line.split(",")):
                module = importlib.import_module(f"trainprobe.{inner}")
                try:
                    assert getattr(module, name) is not None
                except ImportError as error:
                    assert str(error).startswith(f"trainprobe.{inner} has no {name}: "), error
