"""Settings files are read without surprises, and what is no settings file is refused."""

from __future__ import annotations

import time

import pytest

from trainprobe.cli import main
from trainprobe.config_check.capture.environment import capture_environment
from trainprobe.config_check.capture.setting_files import read_settings
from trainprobe.config_check.names import WITHHELD, load_names
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.errors import FormatError


def test_nested_yaml_becomes_dotted_names(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model:\n  lr: 1e-4\n  betas: [0.9, 0.95]\n  none: null\nlist:\n- name: a\n- name: b\non: true\n")
    values = read_settings(file)["values"]
    assert values == {
        "model.lr": "1e-4",
        "model.betas": [0.9, 0.95],
        "model.none": None,
        "list.0.name": "a",
        "list.1.name": "b",
        "True": True,
    }


def test_json_is_read(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": false}}')
    assert read_settings(file)["values"] == {"zero_optimization.stage": 2, "fp16.enabled": False}


def test_toml_is_read_and_a_broken_one_says_its_place(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text('[optimizer]\nlr = 8e-4\n[training]\nseq_len = 2048\ndataset = "c4"\n')
    assert read_settings(file)["values"] == {"optimizer.lr": 8e-4, "training.seq_len": 2048, "training.dataset": "c4"}
    file.write_text("lr = \n")
    with pytest.raises(FormatError, match=r"train\.toml: .*line 1"):
        read_settings(file)


def test_a_yaml_file_of_100_megabytes_is_refused_at_once(tmp_path):
    file = tmp_path / "big.yaml"
    with file.open("wb") as f:
        f.truncate(100 << 20)
    with pytest.raises(FormatError, match=f"has {100 << 20} bytes; settings above"):
        read_settings(file)


def test_yaml_anchors_that_expand_without_end_are_refused(tmp_path):
    file = tmp_path / "laughs.yaml"
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    file.write_text("\n".join(lines))
    with pytest.raises(FormatError, match="more than"):
        read_settings(file)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: [1\nb: 2", "line 2"),
        ("a.yaml", "!!python/object/apply:os.system ['touch x']", "not valid YAML"),
        ("a.json", "{\n'a': 1}", "line 2"),
        ("a.json", "[1]", "holds a list"),
        ("a.sh", "echo 'x", "line 1"),
        ("a.txt", "a", "ends in '.txt'"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(tmp_path, name, text, said):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(FormatError, match=said):
        read_settings(file)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"a: \xff\xfe")
    with pytest.raises(FormatError, match="not UTF-8"):
        read_settings(file)


@pytest.mark.parametrize("key", ["wandb_api_key", "model.hf_token", "--password", "AWS_SECRET_ACCESS_KEY", "hub.token"])
def test_a_secret_setting_is_withheld(key):
    assert load_names().is_secret(key)


@pytest.mark.parametrize("key", ["pad_token", "eos_token", "num_tokens", "token_dropout", "key_dim", "num_key_value_heads"])
def test_settings_that_only_sound_like_secrets_are_kept(key):
    assert not load_names().is_secret(key)


@pytest.mark.parametrize(
    "value",
    ["hf_abcdefghijklmnopqrstuvwx", "ghp_0123456789abcdefghijABCDEF", "sk-proj-abc123def456ghi789jkl", "AKIAIOSFODNN7EXAMPLE"],
)
def test_a_value_that_looks_like_a_key_is_withheld_whatever_its_name(tmp_path, value):
    file = tmp_path / "a.yaml"
    file.write_text(f"model: {value}\nname: hf-internal-testing/tiny-random-gpt2\nurl: https://me:pass@host/x\n")
    values = read_settings(file)["values"]
    assert values == {"model": WITHHELD, "name": "hf-internal-testing/tiny-random-gpt2", "url": "https://***:***@host/x"}


def test_secrets_of_the_environment_are_only_named_and_what_captures_it_is_left_out():
    variables = {
        "OPENAI_API_KEY": "abc",
        "MY_PASSWORD": "def",
        "NCCL_ALGO": "Ring",
        "EDITOR": "vi",
        "HF_TOKEN": "ghi",
        "DB_DSN": "jkl",
        "TRAINPROBE_CONFIG_CHECK": "{}",
    }
    captured = capture_environment(variables)
    assert captured["variables"] == {"NCCL_ALGO": "Ring"}
    assert captured["withheld"] == ["DB_DSN", "HF_TOKEN", "MY_PASSWORD", "OPENAI_API_KEY"]
    assert list(captured["others"]) == ["EDITOR"]
    assert captured["others"]["EDITOR"] != "vi"


def test_the_static_command_makes_a_pack_of_several_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text("export NCCL_ALGO=Tree\ntorchrun train.py --lr 1e-4 --wandb-api-key abcd\n")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "m.yaml").write_text("hidden: 8")
    assert main(["config-check", "collect", "--scripts", "train.sh", "ds.json", "m.yaml", "-o", "pack.zip"]) == 0
    rank = read_pack(tmp_path / "pack.zip").ranks[0]
    sources = {s["name"]: s["values"] for s in rank.single["hyperparameters"]["sources"]}
    assert sources == {
        "train.sh": {"lr": "1e-4", "wandb-api-key": WITHHELD},
        "ds.json": {"train_batch_size": 8},
        "m.yaml": {"hidden": 8},
    }
    assert rank.single["environment"]["variables"]["NCCL_ALGO"] == "Tree"


REFERENCES = """
a: {b: 3, c: text, list: [1, 2, ten], empty: null, flag: true}
model: {lr: 0.001, size: 16}
plain: ${a.b}
within: pre-${a.c}-post
default: ${oc.select:a.nothing,7}
there: ${oc.select:a.b,7}
nothing: ${oc.select:a.nothing}
variable: ${oc.env:TRAINPROBE_TEST_HOME}/x
unset: ${oc.env:TRAINPROBE_TEST_UNSET,1e-6}
item: ${a.list[1]}
whole: ${a.list}
again: ${plain}
copy: ${model}
in: {x: 1, y: "${.x}", z: {w: "${..x}"}}
nested: ${oc.select:a.nope,${a.b}}
deep: ${a.${which}}
which: b
flag: ${a.flag}
parts: [1, "${a.b}"]
unknown: ${now:%Y}
circle: ${round}
round: ${circle}
"""


def test_references_are_what_they_refer_to(tmp_path, monkeypatch):
    """Case p07."""
    monkeypatch.setenv("TRAINPROBE_TEST_HOME", "/data")
    path = tmp_path / "a.yaml"
    path.write_text(REFERENCES)
    values = read_settings(path)["values"]
    expected = {  # what OmegaConf 2.4 makes of this file
        **{"plain": 3, "within": "pre-text-post", "default": 7, "there": 3, "nothing": None, "variable": "/data/x"},
        **{"unset": "1e-6", "item": 2, "whole": [1, 2, "ten"], "again": 3, "copy.lr": 0.001, "copy.size": 16, "in.y": 1},
        **{"in.z.w": 1, "nested": 3, "deep": 3, "flag": True, "parts": [1, 3]},
        "unknown": "${now:%Y}",  # nothing in the file tells it
    }
    assert {name: values[name] for name in expected} == expected
    assert "${" in values["circle"]
    assert "copy" not in values


def test_a_secret_that_is_referred_to_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "do-not-tell")
    path = tmp_path / "a.yaml"
    path.write_text("name: ${oc.env:HF_TOKEN}\nlogin: me:${oc.env:HF_TOKEN}\n")
    assert "do-not-tell" not in repr(read_settings(path))


def test_references_that_grow_without_end_are_bounded(tmp_path):
    path = tmp_path / "a.yaml"
    rows = [f"m{i}: {{a: '${{m{i + 1}}}', b: '${{m{i + 1}}}', c: '${{m{i + 1}}}'}}" for i in range(40)]
    path.write_text("\n".join([*rows, "m40: {x: 1}"]))
    begin = time.process_time()
    assert len(read_settings(path)["values"]) <= 200_000
    path.write_text("\n".join(f"a{i}: ${{a{i + 1}}}" for i in range(2_000)))
    read_settings(path)
    assert time.process_time() - begin < 60  # without bounds it would not end
