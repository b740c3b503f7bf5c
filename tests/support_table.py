"""Makes the support table of docs/frameworks.md out of what tests have proved, and tells what it says that no test proves.

python -m tests.support_table             # after `make test`: writes the table
python -m tests.support_table --check     # fails where the table says what the last run did not prove
"""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.proofs import FOLDER, PACKAGES, Proof

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN = "<!-- made by `python -m tests.support_table` of the tests that ran -->"
END = "<!-- end of the table -->"
HEAD = "Each framework, what a user writes, and what was run in CI:\n"
CALLBACK = '`Trainer(callbacks=[ProbeCallback("plan.yaml")])`'
LINES = {
    "PyTorch": "`with trainprobe.watch(model, optimizer) as probe:`, or `trainprobe run plan.yaml -- train.py`",
    "Lightning": f"{CALLBACK}, also as `class_path` in a file of LightningCLI",
    "Hugging Face Trainer": CALLBACK,
    "Accelerate": "as a plain loop",
    "DeepSpeed": '`engine = trainprobe.integrations.deepspeed.attach(engine, "plan.yaml")`',
    "Megatron-core": "`--probe-plan plan.yaml`, or `attach(model, optimizer, plan)`",
    "MindSpeed": "the same flag",
    "MindSpore": f"{CALLBACK}, also of `mindspore.train.Model`",
    "MindFormers": f"{CALLBACK}, or from a configuration file",
}


def declared() -> set[Proof]:
    """Return what the markers in the tests say, read from their text."""
    found: set[Proof] = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ".proves(" in text and path.name != "proofs.py":
            calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            found |= {proof for call in calls if getattr(call.func, "attr", "") == "proves" for proof in _said(call)}
    return found


def _said(call: ast.Call) -> Iterator[Proof]:
    framework, *whats = (ast.literal_eval(argument) for argument in call.args)
    ranks = next((ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == "ranks"), 1)
    for what in whats:
        for text in what.values() if isinstance(what, dict) else (what,):
            yield from ((framework, text, number) for number in (ranks if isinstance(ranks, tuple) else (ranks,)))


def proved() -> tuple[set[Proof], dict[str, str]]:
    """Return what the last runs of the tests proved and a test still declares, and framework → the versions that ran."""
    found: set[Proof] = set()
    versions: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.json")):
        left = json.loads(path.read_text())
        found |= {(framework, what, ranks) for framework, what, ranks, good in left["outcome"] if good}
        versions |= left["versions"]
    return found & declared(), versions


def table(proofs: set[Proof], versions: dict[str, str]) -> str:
    """Return the list: framework and version, the line, and by number of ranks what ran."""
    lines = [HEAD]
    for framework in PACKAGES:
        by_ranks: dict[int, list[str]] = {}
        for _, what, ranks in sorted(p for p in proofs if p[0] == framework):
            by_ranks.setdefault(ranks, []).append(what)
        if by_ranks:
            lines.append(_wrapped(f"- **{f'{framework} {versions[framework]}'.strip()}**: {LINES[framework]}", "  "))
            ran = (f"  - {n} rank{'s' if n > 1 else ''}: {', '.join(by_ranks[n])}" for n in sorted(by_ranks))
            lines += [_wrapped(line, "    ") for line in ran]
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def told(page: str) -> tuple[set[Proof], dict[str, str]]:
    """Return what the table of the page says, and framework → version."""
    found: set[Proof] = set()
    versions: dict[str, str] = {}
    text = page.split(BEGIN)[1].split(END)[0].strip().removeprefix(HEAD.strip()).strip()
    for entry in re.split(r"^- ", re.sub(r"\n {4}", " ", text), flags=re.M)[1:]:
        first, *cells = entry.rstrip().split("\n  - ")
        name = first.removeprefix("**").split("**: ")[0]
        framework = next(known for known in sorted(PACKAGES, key=len, reverse=True) if name.startswith(known))
        versions[framework] = name.removeprefix(framework).strip()
        for cell in cells:
            ranks, whats = cell.split(": ", 1)
            found |= {(framework, what, int(ranks.split()[0])) for what in whats.split(", ")}
    return found, versions


def main(check: bool) -> int:
    """Write the table, or compare it; return the exit code."""
    (proofs, versions), page = proved(), PAGE.read_text(encoding="utf-8")
    if not check:
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(proofs, versions)}\n{END}{after}", encoding="utf-8")
        return 0
    said, shown = told(page)
    ran = set(versions)  # where MindSpore's environment could not be made, its rows are left to a run that has it
    wrong = [f"no test of this run proved: {' '.join(map(str, proof))}" for proof in sorted(said - proofs) if proof[0] in ran]
    other = [name for name in sorted(ran & set(shown)) if shown[name] != versions[name]]
    wrong += [f"{name}: the table says {shown[name]}, what ran was {versions[name]}" for name in other]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
