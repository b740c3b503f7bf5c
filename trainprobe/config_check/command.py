"""`trainprobe config-check`: collect a pack, compare two, merge the packs of ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.comparison.ci_formats import Github, Junit, case_of, tell
from trainprobe.comparison.terminal import say
from trainprobe.config_check.capture.setting_files import KINDS
from trainprobe.config_check.settings import CapturedSettings, make_settings
from trainprobe.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, no_args_is_help=True)
_PASS_ON = {"ignore_unknown_options": True}


@app.command(context_settings=_PASS_ON)  # pyright: ignore[reportUntypedFunctionDecorator]
def collect(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="A training command; 4 micro-steps of it are captured.", show_default=False),
    ] = None,
    scripts: Annotated[
        list[str] | None, typer.Option("--scripts", "-s", help="Shell, YAML, JSON or TOML files that hold settings.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The pack to write.")] = Path("config_check_pack.zip"),
    micro_steps: Annotated[int, typer.Option(help="How many micro-steps of the command to capture.")] = 4,
    tokens: Annotated[int, typer.Option(help="How many first elements of each integer input to store as they are.")] = 0,
) -> int:
    """Write a pack of a command that is run (`collect -- python train.py …`), or of settings files alone (`--scripts`).

    Exit code: that of the command, or 3 where it trained nothing that could be captured.
    """
    files, command = _split(scripts or [], list(words or []))
    settings = make_settings({"output": output, "micro_steps": micro_steps, "tokens": tokens, "scripts": files})
    if not files and not command:
        raise UsageError("nothing to collect: give `--scripts train.sh …`, or a command behind `--`")
    from trainprobe.config_check.overwrite import refuse_foreign

    refuse_foreign(output)
    console = Console(stderr=True, highlight=False)
    code = _run(settings, command) if command else _static(settings)
    if code == 0:
        say(console, f"pack: {output}")
    return code


def _static(settings: CapturedSettings) -> int:
    from trainprobe.config_check.static_pack import write_static_pack

    write_static_pack(settings, "made from files: data, weights and randomness were not captured")
    return 0


def _run(settings: CapturedSettings, command: list[str]) -> int:
    """Run a command under capture; its exit code is ours, and 3 where it trained nothing that could be captured."""
    from trainprobe.config_check.auto_attach import environment_for
    from trainprobe.config_check.pack_reader import rank_parts

    before = settings.output.stat().st_mtime_ns if settings.output.exists() else 0
    try:
        code = subprocess.run(command, env=environment_for(settings, list(settings.scripts)), check=False).returncode
    except OSError as error:
        raise UsageError(f"{command[0]!r} cannot be run: {error.strerror or error}") from None
    written = settings.output.exists() and settings.output.stat().st_mtime_ns != before
    if code == 0 and not written and not rank_parts(settings.output):
        raise UsageError(f"{' '.join(command)[:200]}: no torch module was called in training mode, so there is no pack")
    return code


def _split(scripts: list[str], words: list[str]) -> tuple[list[str], list[str]]:
    """Divide words into further settings files, which must follow --scripts, and the command."""
    files = list(scripts)
    while scripts and words and Path(words[0]).suffix.lower() in KINDS:
        files.append(words.pop(0))
    return files, words


@app.command()  # pyright: ignore[reportUntypedFunctionDecorator]
def compare(
    bench: Annotated[Path, typer.Argument(help="The pack of the run that is taken as right.", metavar="A")],
    cmp: Annotated[Path, typer.Argument(help="The pack of the other run.", metavar="B")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the reports.")] = None,
    formats: Annotated[
        str, typer.Option("--format", "-f", help="Reports to write: xlsx, html, json, md, separated by commas.")
    ] = "xlsx,html",
    junit: Junit = None,
    github: Github = False,
) -> int:
    """Say what differs between two packs. Exit code: 0 pass, 1 warnings, 2 errors, 3 could not compare."""
    from trainprobe.config_check.compare import compare_packs
    from trainprobe.config_check.pack_reader import read_pack
    from trainprobe.config_check.report import check_formats, write_reports
    from trainprobe.config_check.report.terminal import show

    kinds = [name.strip() for name in formats.split(",") if name.strip()]
    check_formats(kinds)
    comparison = compare_packs(read_pack(bench), read_pack(cmp))
    console = Console(highlight=False)
    show(comparison, console)
    if output is not None:
        for path in write_reports(comparison, output, kinds):
            say(console, f"report: {path}", "dim")
    remarks = [finding.text for check in comparison.checks for finding in check.findings]
    tell("config-check", [case_of(f"{bench} and {cmp}", comparison.exit_code, comparison.sentence, remarks, 0)], junit, github)
    return comparison.exit_code


@app.command()  # pyright: ignore[reportUntypedFunctionDecorator]
def merge(
    pack: Annotated[Path, typer.Argument(help="The merged pack to write, from PACK.rank0.zip and so on beside it.")],
) -> int:
    """Join the packs of single ranks into one; exit code 1 where ranks are missing."""
    from trainprobe.config_check.merge import merge_ranks
    from trainprobe.config_check.overwrite import refuse_foreign

    refuse_foreign(pack)
    missing = merge_ranks(pack)
    console = Console(highlight=False)
    say(console, f"pack: {pack}{f' (without ranks {missing})' if missing else ''}")
    return 1 if missing else 0
