"""Makes docs/config_check_table.md of the tables that the capture itself reads: `python -m tests.config_check.table`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from trainprobe.config_check.capture.environment import table as variables
from trainprobe.config_check.capture.loaders import LOADER_SETTINGS
from trainprobe.config_check.capture.loop_calls import CLIPPING, GROWTH
from trainprobe.config_check.capture.model_state import HOOKS, TENSOR_HOOKS
from trainprobe.config_check.capture.switch_table import switches
from trainprobe.config_check.capture.wrapper_settings import WRAPPERS
from trainprobe.config_check.names import load_names

PAGE = Path(__file__).parents[2] / "docs" / "config_check_table.md"
HEAD = """# Config check: everything that is captured by name

<!-- made by `python -m tests.config_check.table` of the tables in the code -->

`numbers`: a difference is an error; `rounding` and `speed`: a warning; `place`: a note. [config_check.md](config_check.md) says
what else is captured: settings, data, weights and random calls, which have no fixed names.
"""


def page() -> str:
    """Return the text of the page."""
    names = load_names()
    wrappers = [(f"`{kind}`", _code(settings)) for kind, settings in WRAPPERS.items()]
    return "\n".join(
        [
            HEAD,
            "## Switches of torch\n\nRead in the first micro-step, while the model is called.\n",
            *_table(("switch", "effect", "what it does"), ((n, r["effect"], r["what"]) for n, r in switches().items())),
            "\n## Environment variables\n",
            "The first row that fits decides. A hash is kept of all others, and those that differ are named.\n",
            *_table(("variable", "effect", "what it does"), ((f"`{n}`", effect, what) for n, effect, what in variables())),
            _wrapped(f"\nVariables that say where a run was started are not compared: {_code(names.variables_of_place)}."),
            "\n## Objects of the program\n",
            *_listed(
                [
                    ("data loader", _code(LOADER_SETTINGS)),
                    ("gradient clipping", f"the arguments of {_code(CLIPPING)}"),
                    ("loss scaler", _code(("init_scale", "enabled", *GROWTH))),
                    *wrappers,
                    ("modules and weights", ", ".join(dict.fromkeys((*HOOKS.values(), *TENSOR_HOOKS.values(), *_STATE)))),
                ],
            ),
            _wrapped(f"\nReported only where the data differ: {_code(sorted(names.speed))}.") + "\n",
        ]
    )


_STATE = ("evaluation mode", "a `forward` of one module that was replaced", "torch.compile and its arguments", "requires_grad")


def _listed(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [textwrap.fill(f"- {name}: {what}", 128, subsequent_indent="  ", break_long_words=False) for name, what in rows]


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {line} |" for line in lines)]


def _wrapped(text: str) -> str:
    return "\n" + textwrap.fill(text.strip(), 126, break_long_words=False, break_on_hyphens=False)


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
