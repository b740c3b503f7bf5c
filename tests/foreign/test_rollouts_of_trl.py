"""TRL's own trainers keep their bits under the callback, and their rollouts become series."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = """
import hashlib, sys
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
import trl

method, reward_of, watched = sys.argv[1:4]
words = [f"w{i}" for i in range(60)]
vocabulary = {name: i for i, name in enumerate(["<pad>", "<bos>", "<eos>", *words])}
tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokens, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>", padding_side="left"
)
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))
data = Dataset.from_dict({"prompt": [" ".join(words[(7 * i + j) % 60] for j in range(4)) for i in range(64)]})

def varied(completions, **_):
    return [sum(word in ("w5", "w6") for word in text.split()) + 0.1 * len(set(text.split())) for text in completions]

def constant(completions, **_):
    return [1.0] * len(completions)

config, trainer = getattr(trl, method + "Config"), getattr(trl, method + "Trainer")
arguments = config(
    "out", per_device_train_batch_size=8, num_generations=4, max_completion_length=12, max_steps=30, logging_steps=1,
    report_to=[], save_strategy="no", learning_rate=1e-3, use_cpu=True, beta=0.0, disable_tqdm=True,
)
callbacks = []
if watched == "watched":
    from trainprobe.integrations.transformers import ProbeCallback
    callbacks = [ProbeCallback(output="probe_out")]
trainer(
    model=model, reward_funcs={"varied": varied, "constant": constant}[reward_of], args=arguments, train_dataset=data,
    processing_class=tokenizer, callbacks=callbacks,
).train()
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("bits", hashlib.sha256(bits).hexdigest(), torch.rand(1).item())
"""


def train(folder: Path, *given: str) -> tuple[str, str]:
    """Return the line of the weights' bits, and all that was said."""
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", TRAINING, *given], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("bits")), done.stdout + done.stderr


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_thirty_steps_keep_their_bits_and_have_no_finding(method, tmp_path):
    plain, _ = train(tmp_path / "plain", method, "varied", "plain")
    watched, said = train(tmp_path / "watched", method, "varied", "watched")
    assert watched == plain
    assert "30 steps watched, no findings" in said
    with (tmp_path / "watched/probe_out/rank0/metrics.csv").open() as file:
        rows = [row for row in csv.reader(file) if len(row) > 7 and row[4].startswith("rollout/")]
    assert {row[0] for row in rows} == {str(step) for step in range(1, 31)}
    assert {"rollout/reward", "rollout/length", "rollout/ended", "rollout/flat_groups"} <= {row[4] for row in rows}


def test_a_reward_that_never_varies_is_told(tmp_path):
    _, said = train(tmp_path / "run", "GRPO", "constant", "watched")
    assert "the responses of each prompt have equal rewards: nothing can be learnt" in said
