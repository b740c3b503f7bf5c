"""The command as a whole: its table of verbs, exit codes and what it imports."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainprobe
from trainprobe import cli
from trainprobe.errors import ProbeError
from trainprobe.self_test.completion_command import options_of_verbs

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trainprobe", *arguments], capture_output=True, text=True, check=False)


def use(monkeypatch: pytest.MonkeyPatch, verb: object) -> None:
    monkeypatch.setattr(sys.modules[__name__], "verb_under_test", verb, raising=False)
    monkeypatch.setitem(cli.VERBS, "plan", (f"{__name__}:verb_under_test", "a verb"))


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_printed(word: str) -> None:
    done = run(word)
    assert (done.returncode, done.stdout) == (0, f"trainprobe {trainprobe.__version__}\n")


def test_every_verb_has_an_example_whose_options_it_knows() -> None:
    assert list(cli.EXAMPLES) == list(cli.VERBS)
    options = options_of_verbs()
    for verb, example in cli.EXAMPLES.items():
        words = shlex.split(example.split(" -- ")[0])
        assert example.startswith(f"trainprobe {verb} ") or example.startswith("eval"), example
        if " " not in verb:
            assert {word for word in words if word.startswith("--")} <= {*options[verb], "--"}, example
    done = run("judge", "--help")
    assert "Example: trainprobe judge probe_out" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [(["dump"], ["dump-compare"]), (["ckpt-compare", "--js"], ["--json"]), (["config-check", "me"], ["merge"])],
)
def test_bash_completes_verbs_and_options(tmp_path: Path, line: list[str], offered: list[str]) -> None:
    script = tmp_path / "completion.sh"
    script.write_text(run("completion", "bash").stdout)
    press = f"source {script}; COMP_WORDS=(trainprobe {' '.join(line)}); COMP_CWORD={len(line)}; _trainprobe"
    done = subprocess.run(["bash", "-c", f'{press}; echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_given_every_verb(shell: str) -> None:
    script = run("completion", shell).stdout
    assert [verb for verb in cli.VERBS if verb.partition(" ")[0] not in script] == []
    assert run("completion", "tcsh").returncode == cli.NO_ANSWER


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_verb(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert [verb for verb in cli.VERBS if verb not in done.stdout] == []


def test_help_imports_no_tensor_library() -> None:
    code = "import sys; from trainprobe.cli import main; main(['--help']); print({'torch', 'numpy', 'typer'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_an_unknown_verb_gives_64_and_the_nearest_one() -> None:
    done = run("paln")
    assert done.returncode == 64
    assert done.stderr == "trainprobe: there is no verb 'paln' — did you mean 'plan'? (`trainprobe --help` lists them)\n"


def test_commands_of_the_other_tool_are_pointed_to_what_takes_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/migration.md has it."""
    rows = (ROOT / "docs" / "migration.md").read_text("utf-8").partition("*command*: here")[2].split("\n- ")
    for command, verb in cli.FORMER.items():
        (row,) = (row for row in rows if re.search(rf"`{command}`[^:]*:", row.partition(": `")[0] + ":"))
        assert f"trainprobe {verb}" in row
        assert cli.main([command]) == cli.MISUSED
        assert capsys.readouterr().err.startswith(f"trainprobe: there is no verb '{command}' — did you mean '{verb}'?")


def test_an_unknown_option_gives_64_which_is_no_verdict() -> None:
    done = run("plan", "--explian")
    assert done.returncode == 64
    assert "--explian" in done.stderr


def test_an_error_of_the_tool_gives_3_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb() -> None:
        raise ProbeError("it cannot be")

    use(monkeypatch, verb)
    assert cli.main(["plan"]) == 3
    assert capsys.readouterr().err == "trainprobe: it cannot be\n"


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1)])
def test_what_a_verb_returns_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, returned: int | None, code: int) -> None:
    use(monkeypatch, lambda: returned)
    assert cli.main(["plan"]) == code


def test_an_interrupt_gives_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def verb() -> None:
        raise KeyboardInterrupt

    use(monkeypatch, verb)
    assert cli.main(["plan"]) == 130


def test_a_fault_of_a_verb_is_shown_in_full_and_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb() -> None:
        raise ZeroDivisionError("of nothing")

    use(monkeypatch, verb)
    assert cli.main(["plan"]) == 3
    said = capsys.readouterr().err
    assert "Traceback" in said and "ZeroDivisionError: of nothing" in said
    assert said.endswith(
        "trainprobe: ZeroDivisionError is a fault of trainprobe, not an answer: please report it with the lines above\n"
    )


@pytest.mark.parametrize("shown", ["", "1"])
def test_an_error_of_the_system_is_a_sentence_and_a_traceback_where_it_is_asked_for(
    shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(monkeypatch, lambda: (tmp_path / "none").read_text())
    monkeypatch.setenv("TRAINPROBE_TRACEBACK", shown)
    assert cli.main(["plan"]) == 3
    said = capsys.readouterr().err
    assert said.endswith(f"trainprobe: {tmp_path / 'none'}: No such file or directory\n")
    assert ("Traceback" in said) == bool(shown)


@pytest.mark.parametrize("arguments", [("plan", "--explain"), ("plan", "--schema"), ("plan",), ("--help",), ("plan", "--help")])
def test_a_closed_pipe_is_no_verdict(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainprobe", *arguments], stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("verb", ["ckpt-compare", "dump-compare", "judge"])
def test_the_help_of_a_comparison_tells_its_exit_codes(verb: str) -> None:
    assert re.search(r"[Ee]xit code", " ".join(run(verb, "--help").stdout.split()))


@pytest.mark.parametrize("verb", [("run",), ("config-check", "collect")])
def test_the_usage_of_what_starts_a_command_shows_where_it_stands(verb: tuple[str, ...]) -> None:
    usage = " ".join(run(*verb, "--help").stdout.split()).partition("Usage:")[2]
    assert "-- COMMAND" in usage.partition("╭")[0]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_of_the_table_exists(verb: str) -> None:
    module, _, attribute = cli.VERBS[verb][0].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_every_verb_that_the_user_is_told_to_run_exists() -> None:
    """In messages and documents a command stands between backticks."""
    texts = [*(ROOT / "trainprobe").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    told = {verb: path for path in texts for verb in re.findall(r"`trainprobe ([a-z0-9-]+)", path.read_text())}
    assert len(told) >= 10
    assert {verb: str(path) for verb, path in told.items() if verb not in cli.VERBS and verb != "--help"} == {}


def test_one_argument_has_one_name_in_all_commands():
    from typer.main import get_command

    def commands(verb, command):
        inner = getattr(command, "commands", None)
        return (
            {verb: command}
            if inner is None
            else {k: v for name in inner for k, v in commands(f"{verb} {name}", inner[name]).items()}
        )

    known = {name: command for verb in cli.VERBS for name, command in commands(verb, get_command(cli.app_of(verb))).items()}
    arguments = {
        verb: [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
        for verb, command in known.items()
    }
    for verb in ("judge", "report", "top", "nan-trace", "black-box", "export", "csv2tb"):
        assert arguments[verb] == ["RUN"], verb
    for verb in ("ckpt-compare", "dump-compare", "rollout-compare", "config-check compare", "kernel-dump compare"):
        assert arguments[verb] == ["A", "B"], verb
    for verb, command in known.items():
        outputs = [option.opts for option in command.params if {"-o", "--output"} & set(option.opts)]
        assert all({"-o", "--output"} <= set(names) for names in outputs), verb
