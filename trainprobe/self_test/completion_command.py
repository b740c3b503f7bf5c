"""`trainprobe completion SHELL`: a script that completes verbs and their options.

The script is made once and holds all words, so that a shell need not start Python at each press of the Tab key.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainprobe.errors import UsageError

_BASH = """\
# trainprobe: put this line into ~/.bashrc:  eval "$(trainprobe completion bash)"
_trainprobe() {{
    local words
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
    esac
    if [ "$COMP_CWORD" = 1 ]; then words="{verbs}"; fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _trainprobe trainprobe
"""
_ZSH = """\
# trainprobe: put this line into ~/.zshrc, behind compinit:  eval "$(trainprobe completion zsh)"
_trainprobe() {{
    if (( CURRENT == 2 )); then compadd -- {verbs}; return; fi
    case "$words[2]" in
{cases}
    esac
    _files
}}
compdef _trainprobe trainprobe
"""
_FISH = """\
# trainprobe: trainprobe completion fish > ~/.config/fish/completions/trainprobe.fish
{lines}
"""


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish", show_default=False)],
) -> int:
    """Print the completion script of a shell."""
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in scripts:
        raise UsageError(f"{shell!r} is none of {', '.join(scripts)}")
    typer.echo(scripts[shell](options_of_verbs()), nl=False)
    return 0


def options_of_verbs() -> dict[str, list[str]]:
    """Return the words that may follow each verb: its options, and the second words of verbs of two."""
    from trainprobe.cli import VERBS, app_of

    found: dict[str, list[str]] = {}
    for verb in VERBS:
        first, _, second = verb.partition(" ")
        words = found.setdefault(first, [])
        if second:
            words.append(second)
            continue
        command: Any = typer.main.get_command(app_of(verb))
        words += getattr(command, "commands", {})
        words += [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    return found


def _bash(found: dict[str, list[str]]) -> str:
    cases = "\n".join(f'    {verb}) words="{" ".join(words)}" ;;' for verb, words in found.items())
    return _BASH.format(cases=cases, verbs=" ".join(found))


def _zsh(found: dict[str, list[str]]) -> str:
    cases = "\n".join(f"    {verb}) compadd -- {' '.join(words)} ;;" for verb, words in found.items() if words)
    return _ZSH.format(cases=cases, verbs=" ".join(found))


def _fish(found: dict[str, list[str]]) -> str:
    from trainprobe.cli import VERBS

    lines = [
        f"complete -c trainprobe -n __fish_use_subcommand -a {verb} -d '{VERBS[verb][1].replace(chr(39), '')}'"
        for verb in found
    ]
    for verb, words in found.items():
        for word in words:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c trainprobe -n '__fish_seen_subcommand_from {verb}' {kind}")
    return _FISH.format(lines="\n".join(lines))
