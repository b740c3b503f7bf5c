"""`trainprobe VERB`: a table of verbs, each loaded only when it is called.

A verb is one row here: its name, the module and function that carry it out (a typer-style function with annotated
parameters, returning an exit code or None), and one line of help.

Exit codes: 0, 1 and 2 are answers of a verb (its `--help` tells them); 3 there is no answer: a file, plan or folder cannot be
used or a part of it is damaged, which one sentence tells, or trainprobe itself failed, which a traceback tells; 64 the command
line cannot be understood (EX_USAGE of sysexits.h); 130 interrupted; 141 the reader closed the pipe. With TRAINPROBE_TRACEBACK=1
an error that one sentence tells has its traceback as well.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

from trainprobe.engine.core.log_lines import say
from trainprobe.engine.storage.left_out import told
from trainprobe.errors import ProbeError, did_you_mean

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("trainprobe.demo.command:demo", "train a small GPT with the probe on and show what it saw"),
    "self-test": ("trainprobe.self_test.command:self_test", "verify the whole tool on this machine's device"),
    "doctor": ("trainprobe.self_test.doctor_command:doctor", "what this environment can do, what it lacks, and how to mend it"),
    "completion": ("trainprobe.self_test.completion_command:completion", "the completion script of a shell"),
    "plan": ("trainprobe.engine.plan.command:plan", "check, explain or export the schema of a plan"),
    "migrate": (
        "trainprobe.engine.plan.migrate_command:migrate",
        "convert a config.json of mindstudio-probe into a plan",
    ),
    "report": ("trainprobe.monitor.report_command:report", "one self-contained HTML page of a run"),
    "serve": ("trainprobe.monitor.serve_command:serve", "the page of `report` while a run goes on, for a browser"),
    "judge": ("trainprobe.monitor.judge_command:judge", "the findings of a run, as recorded and judged again"),
    "nan-trace": ("trainprobe.monitor.nan_trace.command:nan_trace", "which call, rank and step made the first NaN or infinity"),
    "top": ("trainprobe.monitor.top_command:top", "live terminal view of a run"),
    "runs": ("trainprobe.monitor.runs_command:runs", "the runs in a folder: ranks, steps, size, findings"),
    "black-box": ("trainprobe.monitor.black_box.black_box_command:black_box", "the last steps before something happened"),
    "export": ("trainprobe.monitor.export_command:export", "write a run as files that other tools open"),
    "csv2tb": ("trainprobe.monitor.csv2tb_command:csv2tb", "turn metric CSV files into TensorBoard event files"),
    "config-check": ("trainprobe.config_check.command:app", "capture and compare everything that decides the numbers of a run"),
    "ckpt-compare": ("trainprobe.ckpt_compare.command:ckpt_compare", "are two checkpoints the same model"),
    "dump-compare": ("trainprobe.dump_compare.command:dump_compare", "where two dumps of the same steps begin to differ"),
    "show": ("trainprobe.dump_compare.page.one_dump:show", "one self-contained HTML page of a dump"),
    "op-check": ("trainprobe.op_check.command:op_check", "is each recorded operator right, or merely rounded"),
    "op-check serve": (
        "trainprobe.op_check.online.command:op_check_serve",
        "judge operators of trainings on other machines while they run",
    ),
    "op-check classic": (
        "trainprobe.op_check.classic.command:op_check_classic",
        "acc_check, run_ut, api_precision_compare and op_generate of mindstudio-probe",
    ),
    "op-check certs": ("trainprobe.op_check.online.command:op_check_certs", "make keys for both sides of `op-check serve`"),
    "kernel-dump": ("trainprobe.kernel_dump.command:app", "list, show, compare and convert what an NPU wrote of its kernels"),
    "ckpt-show": ("trainprobe.ckpt_compare.command:ckpt_show", "list the logical tensors of one checkpoint"),
    "rollout-compare": (
        "trainprobe.rollout.command:rollout_compare",
        "where two reinforcement-learning runs begin to differ, or why log-probabilities do",
    ),
    "floor": (
        "trainprobe.again.conditions.rounding:floor",
        "run a training again with other rounding, to measure what rounding does",
    ),
    "parity": ("trainprobe.again.conditions.layouts:parity", "run one script in several layouts and compare what they compute"),
    "preflight": (
        "trainprobe.preflight.script.command:preflight_script",
        "test the loss and the model of a script on its first batch, and train nothing",
    ),
    "again": ("trainprobe.again.conditions.twice:again", "run one step of a script twice: is the hardware or an op unsteady"),
    "compile-check": (
        "trainprobe.again.conditions.compiled:compile_check_script",
        "does torch.compile change the step of a script, and where",
    ),
    "golden": ("trainprobe.again.conditions.golden:app", "record what a small run computes, and check it after an upgrade"),
    "resume-check": ("trainprobe.again.conditions.resume:resume_check", "does a resumed run have all that the run had"),
    "replay": (
        "trainprobe.again.conditions.replay:replay",
        "run a module of a recorded step again: data, op, precision or hardware",
    ),
    "why": (
        "trainprobe.again.why.why:why",
        "what may be wrong with a run: at most five causes, with what speaks for and against",
    ),
    "mcp": ("trainprobe.agents:mcp", "let an agent read runs, as an MCP server"),
    "run": ("trainprobe.integrations.run_command:run", "run a training script under a plan, with no edit"),
}

# verb → a command line that works where these files are; the last lines of `trainprobe VERB --help`
EXAMPLES = {
    "demo": "trainprobe demo --steps 50",
    "self-test": "trainprobe self-test --device cuda --quick",
    "doctor": "trainprobe doctor /data/runs",
    "completion": 'eval "$(trainprobe completion bash)"',
    "plan": "trainprobe plan plan.yaml",
    "migrate": "trainprobe migrate config.json -o plan.yaml",
    "report": "trainprobe report probe_out -o report.html",
    "serve": "trainprobe serve probe_out",
    "judge": "trainprobe judge probe_out",
    "nan-trace": "trainprobe nan-trace probe_out",
    "top": "trainprobe top probe_out",
    "runs": "trainprobe runs /data/runs",
    "black-box": "trainprobe black-box probe_out/black_box",
    "export": "trainprobe export probe_out -o run.trend.db",
    "csv2tb": "trainprobe csv2tb probe_out -o tensorboard",
    "config-check": "trainprobe config-check compare here.zip there.zip",
    "ckpt-compare": "trainprobe ckpt-compare hf_folder megatron_folder",
    "dump-compare": "trainprobe dump-compare run_a/step0 run_b/step0",
    "show": "trainprobe show probe_out/step0 -o dump.html",
    "op-check": "trainprobe op-check probe_out/step0",
    "op-check serve": "trainprobe op-check serve --listen 127.0.0.1:7700",
    "op-check classic": "trainprobe op-check classic acc_check --help",
    "op-check certs": "trainprobe op-check certs keys",
    "kernel-dump": "trainprobe kernel-dump list dump_folder",
    "ckpt-show": "trainprobe ckpt-show checkpoint.safetensors",
    "rollout-compare": "trainprobe rollout-compare saved_a saved_b",
    "floor": "trainprobe floor plan.yaml -- train.py",
    "parity": "trainprobe parity --layout 'tp=2 --tp 2' --layout dp=2 -- train.py",
    "preflight": "trainprobe preflight -- train.py --lr 3e-4",
    "again": "trainprobe again --step 100 -- train.py --steps 101",
    "compile-check": "trainprobe compile-check -- train.py --lr 3e-4",
    "golden": "trainprobe golden check golden.txt -- train.py",
    "resume-check": "trainprobe resume-check straight.pt resumed.pt",
    "replay": "trainprobe replay probe_out/replay/step3 --double",
    "why": "trainprobe why probe_out --against good_out",
    "mcp": "trainprobe mcp /data/runs",
    "run": "trainprobe run -- train.py --lr 3e-4",
}

# commands of mindstudio-probe whose names are near to other verbs, or to none
FORMER = {
    **dict.fromkeys(
        ("run_ut", "multi_run_ut", "acc_check", "multi_acc_check", "api_precision_compare", "op_generate"), "op-check classic"
    ),
    **dict.fromkeys(("run_overflow_check", "overflow_check", "nan_analyze"), "nan-trace"),
    **dict.fromkeys(("compare", "merge_result", "graph_visualize"), "dump-compare"),
    "parse": "kernel-dump",
}

NO_ANSWER, MISUSED, INTERRUPTED, UNREAD = 3, 64, 130, 141


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code (see the module text)."""
    try:
        with told() as left_out:
            code = _answer(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        return _unread()
    except SystemExit as end:  # what rich and click make of a closed pipe
        if isinstance(end.__context__, BrokenPipeError):
            return _unread()
        raise
    except ProbeError as error:
        return _complain(str(error), NO_ANSWER, error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _complain(f"{where}{error.strerror or error}", NO_ANSWER, error)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except Exception as error:  # noqa: BLE001  (Python would exit with 1, which is an answer of the comparisons)
        traceback.print_exc()
        return _complain(
            f"{type(error).__name__} is a fault of trainprobe, not an answer: please report it with the lines above", NO_ANSWER
        )
    for sentence in left_out:
        code = _complain(sentence, code or NO_ANSWER)
    return code


def _answer(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        _show_verbs()
        return 0
    verb, *rest = arguments
    if rest and f"{verb} {rest[0]}" in VERBS:  # a verb of two words
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    if verb in {"-V", "--version", "version"}:
        from trainprobe import __version__

        sys.stdout.write(f"trainprobe {__version__}\n")
        return 0
    if verb not in VERBS:
        kind = "option" if verb.startswith("-") else "verb"
        hint = did_you_mean(FORMER.get(verb, verb), list(VERBS))
        return _complain(f"there is no {kind} {verb!r}{hint} (`trainprobe --help` lists them)", MISUSED)
    return _carry_out(verb, rest)


def app_of(verb: str) -> Any:
    """Return the typer application that carries out a verb, whose help ends with its example."""
    import typer

    module, _, attribute = VERBS[verb][0].partition(":")
    loaded = getattr(importlib.import_module(module), attribute)
    example = f"Example: {EXAMPLES[verb]}" if verb in EXAMPLES else None
    if isinstance(loaded, typer.Typer):
        loaded.info.epilog = example
        return loaded
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=getattr(loaded, "context_settings", None), epilog=example)(loaded)
    return app


def _carry_out(verb: str, arguments: list[str]) -> int:
    import typer

    try:
        code = app_of(verb)(args=arguments, prog_name=f"trainprobe {verb}", standalone_mode=False, obj=arguments)
    except typer.Abort:
        return _complain("interrupted", INTERRUPTED)
    except _usage_error() as error:
        error.show()  # it knows the usage line and the option it is about
        return MISUSED
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


def _unread() -> int:
    """Let nobody write into a closed pipe any more: the last flush of the interpreter would fail and change the exit code."""
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNREAD


def _complain(sentence: str, code: int, error: BaseException | None = None) -> int:
    if error is not None and os.environ.get("TRAINPROBE_TRACEBACK", "") not in {"", "0"}:
        traceback.print_exception(error)
    say(sentence, severity="error")
    return code


def entry() -> None:
    """Console entry point."""
    sys.exit(main())
