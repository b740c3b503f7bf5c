"""The rules of the house that no linter holds: import direction, names of files, where a framework may be imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomllib

from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.subplans import sections

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trainprobe"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)

# a module may import from its own storey and from those below; the longest prefix counts
STOREYS = {
    "trainprobe": 0,
    "trainprobe.errors": 0,
    "trainprobe.engine.unobserved": 0,
    "trainprobe.engine.compiled": 0,
    "trainprobe.engine": 2,
    **dict.fromkeys(
        [
            f"trainprobe.engine.{name}"
            for name in (
                "core.findings",
                "core.json_schema",
                "core.log_lines",
                "core.places",
                "core.records",
                "core.row_schema",
                "core.words",
                "storage.safe_files",
            )
        ],
        0,
    ),
    **dict.fromkeys([f"trainprobe.engine.{name}" for name in ("arrays", "geometry", "stats", "plan")], 1),
    **dict.fromkeys([f"trainprobe.engine.core.{name}" for name in ("guard", "topology")], 1),
    "trainprobe.engine.core": 1.5,  # what the plan does not need to know; below the tape, the taps and the storage
    **dict.fromkeys([f"trainprobe.engine.{name}" for name in ("probe", "program", "scheduling", "taps", "waiting_steps")], 3),
    "trainprobe.comparison": 3,
    "trainprobe.monitor": 4,
    "trainprobe.config_check": 4,
    "trainprobe.ckpt_compare": 4,
    "trainprobe.dump_compare": 4,
    "trainprobe.op_check": 4,
    "trainprobe.rollout": 4,
    **dict.fromkeys(["trainprobe.rollout.command", "trainprobe.rollout.torch_files"], 7),
    "trainprobe.kernel_dump": 4,
    "trainprobe.preflight": 4,
    **dict.fromkeys([f"trainprobe.run.{name}" for name in ("dump", "composition", "told", "torch_taps", "backend")], 5),
    **dict.fromkeys([f"trainprobe.{name}" for name in ("run", "watching", "pytorch", "core", "mindspore")], 6),
    "trainprobe.integrations": 6,
    **dict.fromkeys(
        [
            f"trainprobe.again.{name}"
            for name in (
                *("recording", "first_place", "model_calls", "step_again", "pack", "replay_plan", "script_runs", "skipping"),
                "conditions.twice",
            )
        ],
        5,
    ),
    "trainprobe.again": 7,
    "trainprobe.demo": 7,
    "trainprobe.preflight.script": 7,
    "trainprobe.self_test": 8,
    "trainprobe.cli": 8,
    **dict.fromkeys(["trainprobe.agents", "trainprobe.pytest_plugin"], 8),
    "trainprobe.__main__": 8,
}
APART = [name for name, storey in STOREYS.items() if storey == 4]
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "const", "constants", "misc", "manager"}
FRAMEWORKS = {
    *("torch", "torch_npu", "mindspore", "jax", "tensorflow", "lightning", "pytorch_lightning", "transformers", "accelerate"),
    *("deepspeed", "megatron", "mindspeed", "mindformers"),
}
MAY_IMPORT_FRAMEWORKS = (
    *(
        "again",
        "engine/arrays",
        "engine/capture",
        "engine/state_guard",
        "engine/training_guard",
        "ckpt_compare/formats",
        "config_check/capture",
        "op_check",
        "demo",
        "integrations",
        "monitor/audit/capture",
        "monitor/audit/observers",
        "preflight",
        "rollout/health",
        "self_test",
    ),
)
LONG_FILE, LONGEST_FILE = 400, 600  # lines
LONG_FUNCTION, LONGEST_FUNCTION = 40, 80  # lines without the docstring


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Yield each imported module, whether that happens when the file itself is imported, and the line."""
    stack: list[tuple[ast.AST, bool]] = [(tree(path), True)]
    while stack:
        node, at_once = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend((child, at_once) for child in node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_once, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the direction"
            yield from ((f"{node.module}.{alias.name}", at_once, node.lineno) for alias in node.names)
        inside = at_once and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        stack.extend((child, inside) for child in ast.iter_child_nodes(node))


def storey(module: str) -> int:
    return STOREYS[max((known for known in STOREYS if f"{module}.".startswith(f"{known}.")), key=len)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_point_one_way() -> None:
    """Inside a function, engine files may look up within the engine: a noun loads its verbs when they are asked for."""
    wrong: list[str] = []
    for path in FILES:
        me = module_name(path)
        if me == "trainprobe":
            continue
        for target, at_once, line in imports(path):
            if not target.startswith("trainprobe.") or target == "trainprobe.__version__":
                continue
            if not at_once and me.startswith("trainprobe.engine.") and target.startswith("trainprobe.engine."):
                continue
            if storey(target) > storey(me):
                wrong.append(f"{relative(path)}:{line} imports {target} from above")
    assert wrong == []


def test_every_module_of_ours_that_is_imported_is_there() -> None:
    """The type checker does not complain of missing modules, because frameworks may be missing."""
    wrong: list[str] = []
    for path in [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(tree(path)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                place = ROOT / (name or "").replace(".", "/")
                if (name or "").startswith(("trainprobe.", "tests.", "benchmarks.")):
                    there = place.is_dir() or place.with_suffix(".py").exists() or any(place.parent.glob(f"{place.name}.*.so"))
                    wrong += [] if there else [f"{relative(path)}:{node.lineno} imports {name}"]
    assert wrong == []


def test_the_packages_above_the_engine_never_import_each_other() -> None:
    """But for the files of a package that stand above all of them."""
    wrong: list[str] = []
    for path in (path for path in FILES if storey(module_name(path)) == 4):
        own = next((name for name in APART if f"{module_name(path)}.".startswith(f"{name}.")), None)
        others = [f"{name}." for name in APART if own and name != own]
        wrong += [
            f"{relative(path)}:{line} imports {target}" for target, _, line in imports(path) if target.startswith(tuple(others))
        ]
    assert wrong == []


def test_the_engine_knows_no_program_by_its_name_and_none_by_its_place() -> None:
    """Sinks have names too, one of them that of a program; the plan has a section for each program, and the monitor's files."""
    others = re.compile(r"""["'](monitor|audit|black_box|config_check|op_check)["']""")
    chosen = re.compile(r"""["']dump["'][,)]* (not )?(in|==) \S*programs|programs\)? == .*["']dump|programs\[""")
    engine = [path for path in FILES if path.is_relative_to(PACKAGE / "engine") and "plan" not in path.parts]
    lines = [(path, line) for path in engine for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(engine) > 100
    assert [(path.name, line) for path, line in lines if others.search(line) or chosen.search(line)] == []


def test_frameworks_are_imported_only_where_they_belong() -> None:
    wrong: list[str] = []
    for path in FILES:
        if path.relative_to(PACKAGE).as_posix().startswith(MAY_IMPORT_FRAMEWORKS):
            continue
        for target, _, line in imports(path):
            if target.split(".")[0] in FRAMEWORKS or target.startswith(("safetensors.torch", "safetensors.mindspore")):
                wrong.append(f"{relative(path)}:{line} imports {target}")
    assert wrong == []


def test_a_file_is_named_for_its_one_idea() -> None:
    wrong = [
        relative(path)
        for path in [*FILES, *(ROOT / "tests").rglob("*.py")]
        if BANNED_NAMES & set(path.stem.removeprefix("test_").split("_")) or path.stem.endswith(("_v2", "_new", "_old"))
    ]
    assert wrong == []


def test_everything_is_caught_only_by_the_guard() -> None:
    """And by the command line, whose exit code 1 is an answer. A handler that ends in a bare `raise` lets everything pass."""
    wrong: list[str] = []
    for path in FILES:
        if relative(path) in {"trainprobe/engine/core/guard.py", "trainprobe/cli.py"}:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and ast.unparse(node.body[-1]) != "raise":
                kinds = ast.unparse(node.type) if node.type else "everything"
                if {"Exception", "BaseException", "everything"} & set(kinds.strip("()").replace(" ", "").split(",")):
                    wrong.append(f"{relative(path)}:{node.lineno} catches {kinds}")
    assert wrong == []


_OPENS = {
    "open",
    "read_text",
    "read_bytes",
    "load",
    "memmap",
    "fromfile",
    "ZipFile",
    "read_table",
    "read_schema",
    "read_metadata",
}
_OPENS |= {"safe_open", "memory_map"}
_OPENED_SAFELY = re.compile(
    r"regular\(|__file__|resources|files\(|/proc/|io\.BytesIO|distribution\.|\bfiles\[|shared\(|\bpart\."
)
# rooms that read what they wrote themselves a moment ago, keys that a person names, and what runs in no reader
_OWN_FILES = ("self_test/", "demo/", "again/script_runs.py", "op_check/online/certs.py", "config_check/capture/packages.py")
_NOT_FILES = re.compile(
    r"(json|tomllib|webbrowser|torch_archive|self|probe|_probe|tap|scheduler|writer|super\(\)|get\(name\)|torch_dcp|huggingface|safe_files|f)\.|formats\."
)


def _reads(node: ast.Call) -> bool:
    """Whether a call opens a file for reading by its own means."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in _OPENS or _NOT_FILES.match(ast.unparse(node.func)):
        return False
    owner = ast.unparse(node.func.value)
    if node.func.attr == "load" and owner not in ("np", "torch", "numpy"):
        return False
    if node.func.attr == "open" and owner in ("tarfile", "os", "ipc"):
        return owner == "tarfile"
    given = [part for a in (*node.args, *(k.value for k in node.keywords)) for part in ast.walk(a)]
    modes = [part.value for part in given if isinstance(part, ast.Constant)]
    writes = any(
        isinstance(mode, str) and re.fullmatch(r"[rwax]?[bt]*\+?[bt]*", mode) and set(mode) & set("wax+") for mode in modes
    )
    return not writes


def test_a_file_is_opened_for_reading_in_one_way() -> None:
    """`safe_files` refuses pipes and devices and bounds what is read; libraries that open a file get `regular(path)`."""
    inside = {path: path.relative_to(PACKAGE).as_posix() for path in FILES}
    readers = [path for path in FILES if not inside[path].startswith((*_OWN_FILES, "engine/storage/safe_files.py"))]
    calls = ((path, node) for path in readers for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and _reads(node))
    found = [f"{relative(path)}:{node.lineno} {ast.unparse(node)[:80]}" for path, node in calls]
    assert [call for call in found if not _OPENED_SAFELY.search(call)] == []


def test_nothing_refers_to_all_objects_of_the_process() -> None:
    """A second reference to a tuple that another thread is filling makes that thread fail: see `core/live_objects`."""
    assert not [str(path) for path in FILES if re.search(r"\bget_objects\(\)(?!`)", path.read_text())]


def test_importing_the_package_takes_a_moment_and_no_library() -> None:
    code = (
        "import sys, time; start = time.process_time(); import trainprobe; spent = time.process_time() - start; "
        "print(spent, *({'torch', 'numpy', 'mindspore', 'pydantic'} & {*sys.modules}))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    assert [extra for _, *extra in runs] == [[], [], []]
    assert min(float(spent) for spent, *_ in runs) < 0.1


def lengths() -> Iterator[tuple[str, int, int, int]]:
    """Yield what is long: where, its lines, where to stop and think, and the limit."""
    for path in FILES:
        yield relative(path), len(path.read_text(encoding="utf-8").splitlines()), LONG_FILE, LONGEST_FILE
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                words = node.body[0] if ast.get_docstring(node) else None
                count = (node.end_lineno or 0) - node.lineno + 1 - ((words.end_lineno or 0) - words.lineno + 1 if words else 0)
                yield f"{relative(path)}:{node.lineno} {node.name}", count, LONG_FUNCTION, LONGEST_FUNCTION


def test_no_file_and_no_function_is_longer_than_one_can_read() -> None:
    for where, count, think, _ in lengths():
        if count > think:
            warnings.warn(f"{where}: {count} lines, stop and think at {think}", stacklevel=1)
    assert [f"{where}: {count} lines" for where, count, _, limit in lengths() if count > limit] == []


def test_no_line_of_c_is_wider_than_120_columns() -> None:
    code = [path for kind in ("*.c", "*.h") for path in PACKAGE.rglob(kind)]
    wide = [
        f"{relative(path)}:{at}"
        for path in code
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert (len(code) > 10, wide) == (True, [])


def test_few_names_of_classes_are_used_twice() -> None:
    names = Counter(node.name for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
    assert len([name for name, count in names.items() if count > 1]) <= 15


def test_no_file_of_c_is_long() -> None:
    code = [path for kind in ("*.c", "*.h") for path in PACKAGE.rglob(kind)]
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in code}
    assert {name: count for name, count in lines.items() if count > LONG_FILE} == {}


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in FILES}
    assert [relative(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


# a field of the plan → what the engine calls to learn what it says, where that is not the field itself
READ_THROUGH = {
    **{
        "record": r"\.level\b",
        "step": r"\.wants_step\(",
        "rank": r"\.wants_rank\(",
        "micro": r"\.wants_micro\b",
        "slice": r"\bdetail\.index\(",
    },
    **{"modules": r"\.module_selected\b", "ops": r"\.op_selected\b", "parameters": r"\.parameter_selected\b"},
    **dict.fromkeys(["tensors", "tensor_entries", "details"], r"\.detail_for\("),
    **dict.fromkeys(["task", "summary", "statistics"], r"\.base_detail\b"),
}


@pytest.mark.parametrize("field", [name for name in Plan.model_fields if name not in sections()])
def test_a_field_of_the_plan_is_read_by_the_code_that_carries_it_out(field: str) -> None:
    own = ("trainprobe/engine/plan/",)
    pattern = re.compile(READ_THROUGH.get(field, rf"\b_?(plan|loaded)\.{field}\b"))
    assert any(pattern.search(path.read_text(encoding="utf-8")) for path in FILES if not relative(path).startswith(own))


@pytest.mark.parametrize("file", ["Makefile", "tests/quick.txt"])
def test_the_tests_that_the_makefile_names_are_there(file):
    named = re.findall(r"tests/[\w/]+(?:\.\w+)?", (ROOT / file).read_text())
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_no_two_test_modules_have_one_name():
    """Modules outside packages are imported by their bare names: two of one name cannot be collected together."""
    bare = [path.name for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert sorted(bare) == sorted(set(bare))


def test_the_oldest_environment_holds_the_lower_bounds_of_the_package():
    """A release that pyproject.toml accepts and no test runs with is a claim without proof."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["torch"], *extras["tensorboard"], *extras["xlsx"]]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements/oldest.txt").read_text().lower(), re.M))
    for name, bound in (requirement.split(">=") for requirement in wanted):
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", pins[name]), f"{name}: {bound} is accepted, {pins[name]} is run"
