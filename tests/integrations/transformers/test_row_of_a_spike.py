"""With a Trainer that has a tokenizer, a spike says the text of the row that made it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from trainprobe.integrations.transformers import ProbeCallback

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "blue", "seven"]
STEPS, STRUCK, ROWS = 224, 220, 8


def test_a_spike_says_the_text_of_its_row(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="the"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 0}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )
    texts = ["the cat sat on the mat", "a dog ran under a tree"] * (STEPS * ROWS // 2)
    texts[(STRUCK - 1) * ROWS + 5] = "seven blue mat on tree seven"
    rows = [{"input_ids": torch.tensor(tokenizer(text)["input_ids"])} for text in texts]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    plan = {"output": tmp_path / "run", "console": False, "monitor": {"features": {"loss_rows": {"tokens": 4}}}}
    callback = ProbeCallback(plan)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), per_device_train_batch_size=ROWS, max_steps=STEPS, learning_rate=1e-2, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", lr_scheduler_type="constant", train_sampling_strategy="sequential",
    )  # fmt: skip
    transformers.Trainer(
        model,
        arguments,
        train_dataset=rows,
        callbacks=[callback],
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator,
    ).train()
    spikes = [f for f in callback.findings if f.rule == "spike"]
    assert [f.step for f in spikes[:1]] == [STRUCK]
    assert "; row 5 of 8 on rank 0 has " in spikes[0].message
    assert any(text in spikes[0].message for text in (", around 'seven blue mat on'", ", around 'blue mat on tree'"))
