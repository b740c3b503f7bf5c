"""Two ranks agree: rank 0 tests the rows of both, and the gradients are those that DDP, ZeRO or Megatron makes of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ckpt_compare.test_megatron_lm import INSTALLED, WORDS, needs_megatron_lm
from tests.distributed.launch import ON_A_CPU, ROOT

TRAIN = Path(__file__).with_name("ranks") / "train.py"


RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a folder."""
    env = {**os.environ, **ON_A_CPU, "PYTHONPATH": str(ROOT), "LOCAL_SIZE": "2"}
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300, env=env)


def told(folder: Path, kind: str, *only: str, code: int) -> dict[str, dict]:
    """Run a preflight of two ranks under torchrun; return property → its line."""
    options = [word for name in only for word in ("--only", name)]
    files = ("--json", "answer.json", "--junit", "answer.xml", "--seconds", "600")
    done = run(folder, "-m", "trainprobe", "preflight", *files, *options, "--", *RANKS, str(TRAIN), kind)
    assert done.returncode == code, done.stdout + done.stderr[-3000:]
    assert not (folder / "weights").exists() and not list(folder.glob("out/checkpoint*"))
    answer = json.loads((folder / "answer.json").read_text())
    assert done.stdout.count(answer["sentence"]) == 1, "one rank speaks for all"
    assert (folder / "answer.xml").read_text().count("<testcase") == len(answer["properties"])
    return {line["name"]: line for line in answer["properties"]}


def test_ddp_counts_ranks_alike_and_equal_rows_are_seen(tmp_path):
    lines = told(tmp_path, "ddp", "split", "input", "update", code=2)
    split, counts = lines["split"], (4 * 8, 4 * 3)
    assert "count alike, in the whole batch they count by targets" in split["text"]
    for rank, count in enumerate(counts):
        assert split["figures"][f"factor_{rank}"] == pytest.approx(0.5 * sum(counts) / count, rel=1e-4)
    assert lines["input"]["text"] == "rows 0 and 4 of the batch are the same"
    assert lines["update"]["status"] == "holds"


def test_a_sharded_model_is_refused_with_what_to_do(tmp_path):
    done = run(tmp_path, "-m", "trainprobe", "preflight", "--", *RANKS, str(TRAIN), "sharded")
    assert done.returncode == 3, done.stdout + done.stderr[-3000:]
    assert "the model is sharded (FSDP2 or a tensor-parallel layer): no rank can run the step alone" in done.stderr
    assert "leave the sharding out for the preflight" in done.stderr and not (tmp_path / "weights").exists()


@pytest.mark.frameworks
def test_ranks_of_a_training_that_goes_on_agree(require, tmp_path):
    """Each tests its own rows; only those of the second are broken."""
    require("transformers")
    done = run(tmp_path, *RANKS[1:], str(TRAIN), "callback")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    first, second = ((tmp_path / f"told{rank}").read_text() for rank in (0, 1))
    assert first == second and "input        BROKEN: rows 0 and 1 of the batch are the same" in first
    assert done.stderr.count("preflight of rank 1") == 1 and (tmp_path / "weights").exists()


@pytest.mark.slow
@pytest.mark.frameworks
def test_the_trainer_averages_tokens_over_ranks_that_have_other_numbers_of_them(require, tmp_path):
    require("transformers")
    assert told(tmp_path, "trainer", "split", code=0)["split"]["status"] == "holds"


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize(("kind", "needs"), [("deepspeed", "deepspeed"), ("megatron", "megatron.core")])
def test_gradients_in_buffers_of_a_framework(require, tmp_path, kind, needs):
    require(needs)
    lines = told(tmp_path, kind, "split", "causality", "start", code=0)
    assert [line["status"] for line in lines.values()] == ["holds"] * 3
    assert "4 micro-batches" in lines["split"]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--bf16 --use-distributed-optimizer --ddp-bucket-size 3000"])
@needs_megatron_lm
def test_pretrain_of_megatron_lm_itself(tmp_path, words):
    """Its schedule calls the engine of autograd without `torch.autograd.backward`; its optimizer may hold copies of weights."""
    script = ROOT / "tests/ckpt_compare/writers/write_megatron_lm.py"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env = {**os.environ, **ranks, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{INSTALLED}"}
    command = [sys.executable, "-m", "trainprobe", "preflight", "--json", "answer.json", "--seconds", "600", "--", str(script)]
    more = [*WORDS, "--ckpt-format", "torch", *words.split(), "--save", str(tmp_path / "saved")]
    done = subprocess.run([*command, *more], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = {line["name"]: line for line in json.loads((tmp_path / "answer.json").read_text())["properties"]}
    told = {name for name, line in lines.items() if line["status"] == "holds"}
    assert told >= {"split", "causality", "rows", "gradient", "start", "determinism", "input"}
    assert lines["update"]["status"] == ("not applicable" if words else "holds")
    assert not (tmp_path / "saved").exists(), "nothing was trained"
