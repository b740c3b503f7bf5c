"""`trainprobe op-check classic COMMAND`: the commands of mindstudio-probe's accuracy check, with their flags and files."""

from __future__ import annotations

import csv
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainprobe.engine.core.log_lines import say
from trainprobe.engine.storage.safe_files import text_lines
from trainprobe.errors import FormatError, UsageError, did_you_mean
from trainprobe.op_check.classic.arguments import COMMANDS, parse
from trainprobe.op_check.classic.configs import CheckConfig, OpConfig, read_config, read_op_config
from trainprobe.op_check.command import need_torch, progress

if TYPE_CHECKING:
    from trainprobe.op_check.answer import Answer
    from trainprobe.op_check.dump import Row

_RESULT = re.compile(r"accuracy_checking_result_(\d{14})\.csv")


def op_check_classic(
    command: Annotated[str, typer.Argument(help=", ".join(COMMANDS))],
    arguments: Annotated[list[str] | None, typer.Argument(help="as the command has them; -h lists them")] = None,
) -> int:
    """Answer a command of mindstudio-probe's accuracy check with its files; exit codes are those of op-check."""
    rest = list(arguments or ())
    if command == "-f" and len(rest) > 1:  # `msprobe -f pytorch run_ut …`
        command, rest = rest[1], rest[2:]
    if command not in COMMANDS:
        raise UsageError(f"there is no command {command!r}{did_you_mean(command, list(COMMANDS))}: {', '.join(COMMANDS)}")
    given = parse(command, rest)
    need_torch(getattr(given, "num_splits", 0))
    if command == "api_precision_compare":
        return _compare(given)
    return _generate(given) if command == "op_generate" else _check(given)


op_check_classic.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # type: ignore[attr-defined]


def _check(given: Namespace) -> int:
    """Judge a dump as recorded; write both CSV files, and the failing calls where that was asked for."""
    from trainprobe.op_check.answer import Request, judge
    from trainprobe.op_check.classic.tables import failed, stamped, write_details

    config = read_config(given.config_path) if given.config_path is not None else CheckConfig()
    for note in (*config.notes, *_without_effect(given)):
        say(note)
    before, stamp, folder = set[str](), stamped(), given.out_path
    if given.result_csv_path is not None:
        before, stamp = _interrupted(given.result_csv_path)
        folder = given.result_csv_path.parent
    request = Request(
        [given.api_info_file], config.white_list, [*config.black_list, *map(_literal, sorted(before))], classic_csv=folder
    )
    result = judge(request, progress)
    for path in write_details(result.rows, folder, stamp, config.precision, bool(before)):
        say(f"details: {path}")
    if given.save_error_data:
        _save(failed(result.rows), config.error_data_path / f"ut_error_data{stamp}")
    return _conclude(result)


def _without_effect(given: Namespace) -> list[str]:
    flags = (("-j", given.jit_compile, "nothing is compiled"), ("-d", given.device, "no device is needed"))
    return [f"{flag} has no effect: {why}" for flag, value, why in flags if value]


def _literal(name: str) -> str:
    """Return a pattern that means this name alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _interrupted(path: Path) -> tuple[set[str], str]:
    """Return the calls that a result file has, and its time. Raises UsageError for another name, FormatError for no CSV."""
    name = _RESULT.fullmatch(path.name)
    if name is None:
        raise UsageError(f"-csv_path {path}: a file accuracy_checking_result_ with 14 digits is needed, which was not renamed")
    try:
        return {row["API name"] for row in csv.DictReader(text_lines(path))}, name[1]
    except (KeyError, csv.Error) as error:
        raise FormatError(f"{path} is no accuracy_checking_result file: {error}") from None


def _save(rows: list[Row], folder: Path) -> None:
    from trainprobe.op_check.replay import write_replay

    for row in rows:
        try:
            say(f"error data: {write_replay(row, folder)}")
        except UsageError as why:
            say(str(why))


def _conclude(result: Answer) -> int:
    sys.stdout.write(f"{result.conclusion.sentence}\n")
    return result.conclusion.code


def _compare(given: Namespace) -> int:
    """Compare two details files. Return 2 where a result is an error, 3 where one is SKIP, else 0."""
    from trainprobe.op_check.classic.precision import read_details, write_precision
    from trainprobe.op_check.classic.tables import stamped

    statuses = write_precision(read_details(given.npu_csv_path), read_details(given.gpu_csv_path), given.out_path, stamped())
    counts = {status: statuses.count(status) for status in ("error", "SKIP", "pass")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    sys.stdout.write(f"forward and backward of all calls: {told or 'nothing to compare'}; the files are in {given.out_path}\n")
    return 2 if counts["error"] else 3 if counts["SKIP"] or not counts["pass"] else 0


def _generate(given: Namespace) -> int:
    """Write the script of one call."""
    from trainprobe.op_check.answer import Request, judge
    from trainprobe.op_check.replay import write_replay
    from trainprobe.op_check.standards.report import by_call

    config = read_op_config(given.config_input)
    result = judge(Request([config.dump], [_literal(config.call)]), progress)
    rows = {direction: row for (_, _, call, direction), row in by_call(result.rows).items() if call == config.call}
    if config.direction not in rows:
        raise UsageError(f"{config.dump} has no {config.direction} of {config.call}; it has {', '.join(rows) or 'none'}")
    if config.extract is not None:
        say("extract_api_path has no effect: the safetensors file beside the script holds the call")
    script = write_replay(rows[config.direction], given.api_output_path)
    sys.stdout.write(f"python {script}{_options(config)}\n")
    return 0


def _options(config: OpConfig) -> str:
    return f" --random --seed {config.seed} --repeat {config.repeat}" if config.random_data else ""
