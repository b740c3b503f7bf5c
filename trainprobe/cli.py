"""`trainprobe VERB`: a table of verbs, each loaded only when it is called.

A verb is one row here: its name, the module and function that carry it out (a typer-style function with annotated
parameters, returning an exit code or None), and one line of help.

Exit codes: 0 done; 1 a comparison or check found something; 2 the command line cannot be understood; 3 a file, plan or
folder cannot be used (a ProbeError, told in one sentence); 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from trainprobe.errors import ProbeError, did_you_mean

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("trainprobe.demo.command:demo", "train a small GPT with the probe on and show what it saw"),
    "plan": ("trainprobe.engine.plan_command:plan", "check, explain or export the schema of a plan"),
    "report": ("trainprobe.monitor.report_command:report", "one self-contained HTML page of a run"),
    "judge": ("trainprobe.monitor.judge_command:judge", "apply the rules to a recorded run again"),
    "top": ("trainprobe.monitor.top_command:top", "live terminal view of a run"),
    "black-box": ("trainprobe.monitor.black_box.black_box_command:black_box", "the last steps before something happened"),
    "csv2tb": ("trainprobe.monitor.csv2tb_command:csv2tb", "turn metric CSV files into TensorBoard event files"),
    "config-check": ("trainprobe.config_check.command:app", "capture and compare what decides a run's numbers"),
    "ckpt-compare": ("trainprobe.ckpt_compare.command:ckpt_compare", "are two checkpoints the same model"),
    "dump-compare": ("trainprobe.dump_compare.command:dump_compare", "where do two dumps of the same steps part"),
    "ckpt-show": ("trainprobe.ckpt_compare.command:ckpt_show", "list the logical tensors of one checkpoint"),
    "run": ("trainprobe.integrations.run_command:run", "run a training script under a plan, with no edit"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code (see the module text)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        _show_verbs()
        return 0
    verb, *rest = arguments
    if verb in {"-V", "--version"}:
        from trainprobe import __version__

        sys.stdout.write(f"trainprobe {__version__}\n")
        return 0
    if verb not in VERBS:
        kind = "option" if verb.startswith("-") else "verb"
        return _complain(f"there is no {kind} {verb!r}{did_you_mean(verb, list(VERBS))} (`trainprobe --help` lists them)", 2)
    try:
        return _carry_out(verb, rest)
    except ProbeError as error:
        return _complain(str(error), 3)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)


def _carry_out(verb: str, arguments: list[str]) -> int:
    import typer

    target, text = VERBS[verb]
    module, _, attribute = target.partition(":")
    loaded = getattr(importlib.import_module(module), attribute)
    if isinstance(loaded, typer.Typer):
        app = loaded
    else:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(help=text, context_settings=getattr(loaded, "context_settings", None))(loaded)
    try:
        code = app(args=arguments, prog_name=f"trainprobe {verb}", standalone_mode=False)
    except typer.Abort:
        return _complain("interrupted", 130)
    except _usage_error() as error:
        error.show()  # it knows the usage line and the option it is about
        return int(error.exit_code)
    return code if isinstance(code, int) else 0


def _usage_error() -> Any:
    """Return the class of typer's usage errors, which newer releases carry themselves and older ones took from click."""
    import typer

    return next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def _show_verbs() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2))
    for verb, (_, text) in VERBS.items():
        table.add_row(f"[bold]{verb}[/bold]", text)
    console = Console(highlight=False)
    console.print(
        "trainprobe records, watches and compares the numbers inside a training run, and never changes them.\n", soft_wrap=True
    )
    console.print("Usage: trainprobe VERB …, and `trainprobe VERB --help` for what a verb takes\n", soft_wrap=True)
    console.print(table)


def _complain(sentence: str, code: int) -> int:
    sys.stderr.write(f"trainprobe: {sentence}\n")
    return code


def entry() -> None:
    """Console entry point."""
    sys.exit(main())
