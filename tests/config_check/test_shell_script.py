"""Shell scripts are read as bash would build the arguments; bash itself is the oracle where it is at hand."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from trainprobe.config_check.capture.shell_script import exported_variables, read_shell_script
from trainprobe.errors import FormatError

SCRIPTS = [
    "python train.py --lr 1e-4 --bf16 --seed 1",
    "python train.py --lr=1e-4 '--name=a b' --flag",
    "LR=1e-4\npython train.py --lr $LR --name \"run $LR\" --raw '$LR'",
    "python train.py --lr 1e-4 \\\n  --seed 3 \\\n  --bf16  # --not this",
    'ARGS="--lr 1e-4 --bf16"\npython train.py $ARGS --seed 1',
    'ARGS=(--lr 1e-4\n  --name "two words" # a comment\n)\nARGS+=(--bf16)\npython train.py "${ARGS[@]}" --seed 1',
    "python train.py --neg -1 --range -0.5 --lr ${LR:-3e-4}",
    'A=1; B="$A$A"\npython train.py --b $B --c x"$A"y',
    "python train.py --betas 0.9 0.95 --lr 1 > log.txt 2>&1",
    "export X=1 && python train.py --x $X || echo --not-this",
    'A="--lr 1"\nA+=" --bf16"\npython train.py $A',
    "cat <<EOF\n--not this\n'unclosed\nEOF\npython train.py --lr 1",
    'python train.py --empty "" --quote "a\\"b" --dollar "\\$HOME"',
    "python train.py --json '{\"a\": 1}' --glob \\*",
    "if true; then\n  python train.py --lr 1\nfi",
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", SCRIPTS)
def test_arguments_are_those_that_bash_hands_over(script, tmp_path):
    spy = 'python() { shift; printf "%s\\0" "$@" > words; }\n'
    subprocess.run(["bash", "-c", spy + script], cwd=tmp_path, check=False, stdout=subprocess.DEVNULL, timeout=20)
    words = (tmp_path / ("words" if (tmp_path / "words").exists() else "log.txt")).read_text().split("\0")[:-1]
    read = read_shell_script(script, "train.sh")
    from trainprobe.config_check.capture.shell_script import parse_flags

    assert read == parse_flags(words)


def test_a_flag_before_a_flag_has_no_value():
    assert read_shell_script("python t.py --bf16 --seed 1", "t.sh") == {"bf16": True, "seed": "1"}


def test_arguments_of_the_launcher_are_kept_apart():
    read = read_shell_script("torchrun --nproc_per_node 8 --nnodes=2 train.py --nnodes 5", "t.sh")
    assert read == {"launcher.nproc_per_node": "8", "launcher.nnodes": "2", "nnodes": "5"}


def test_a_module_is_launched_as_well():
    assert read_shell_script("python -m package.train --lr 1", "t.sh") == {"lr": "1"}


def test_a_variable_that_the_script_does_not_set_stays_as_it_is_written():
    assert read_shell_script('python t.py --out "$OUT/x" --n $(nproc)', "t.sh") == {"out": "$OUT/x", "n": "$(nproc)"}


@pytest.mark.parametrize(
    "setting",
    [
        'if [ -z "$LR" ]; then\n  LR=1\nelse\n  LR=2\nfi',
        "case $1 in\n  a) LR=1 ;;\n  b) LR=2 ;;\nesac",
        "for LR in 1 2; do LR=$LR; done",
        "while false; do LR=(1 2); done",
    ],
)
def test_what_is_set_under_a_condition_is_not_guessed(setting):
    assert read_shell_script(f'LR=0\n{setting}\nN=3\npython t.py --lr "$LR" --n $N', "t.sh") == {"lr": "$LR", "n": "3"}


def test_a_command_may_be_nested_in_a_quoted_command():
    read = read_shell_script('python t.py --home "$(dirname "$(realpath "$0")")/x" --price 5$ --lr 1', "t.sh")
    assert read == {"home": '$(dirname "$(realpath "$0")")/x', "price": "5$", "lr": "1"}


def test_variables_that_double_without_end_are_refused():
    script = "A=xxxxxxxx\n" + 'A="$A$A"\n' * 60 + "python t.py --a $A"
    with pytest.raises(FormatError, match=r"t\.sh: its variables expand to more than 16777216 characters"):
        read_shell_script(script, "t.sh")


def test_nothing_is_ever_run(tmp_path):
    read_shell_script(f"python t.py --x $(touch {tmp_path}/a) `touch {tmp_path}/b`", "t.sh")
    assert list(tmp_path.iterdir()) == []


def test_variables_for_the_command_are_read():
    script = "export NCCL_ALGO=Ring\nLR=3\nCUDA_VISIBLE_DEVICES=0 HCCL_DETERMINISTIC=true python t.py --lr $LR"
    assert exported_variables(script, "t.sh") == {
        "NCCL_ALGO": "Ring",
        "CUDA_VISIBLE_DEVICES": "0",
        "HCCL_DETERMINISTIC": "true",
    }


@pytest.mark.parametrize(
    ("script", "line", "what"),
    [
        ('echo ok\npython t.py "unclosed', 2, 'a " that is never closed'),
        ("python t.py 'unclosed", 1, "a ' that is never closed"),
        ("A=(1 2", 1, "never closed with )"),
        ("\n\necho ${X", 3, "a ${ that is never closed"),
        ("echo $(ls", 1, "a $( that is never closed"),
        ("cat <<END\nfoo", 2, "never ends with 'END'"),
    ],
)
def test_a_syntax_error_is_told_with_its_line(script, line, what):
    with pytest.raises(FormatError) as told:
        read_shell_script(script, "train.sh")
    assert f"train.sh, line {line}" in str(told.value)
    assert what in str(told.value)
