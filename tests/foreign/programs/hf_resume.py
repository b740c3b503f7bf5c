"""Hugging Face's Trainer with evaluation in between, then a resume from its checkpoint in the same process."""

import os
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

DATA, OUT = os.environ["DATA"], os.environ["OUT"]
set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(DATA + "/tinylm")
rows = [dict(tokenizer(line)) for line in Path(DATA, "text.txt").read_text().split("\n")[:64]]


def trainer(steps: int) -> Trainer:
    return Trainer(
        AutoModelForCausalLM.from_pretrained(DATA + "/tinylm"),
        TrainingArguments(
            OUT,
            max_steps=steps,
            save_steps=15,
            eval_strategy="steps",
            eval_steps=10,
            warmup_steps=3,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=4,
            logging_steps=5,
            use_cpu=True,
            report_to=[],
        ),
        DataCollatorForLanguageModeling(tokenizer, mlm=False),
        rows,
        rows[:8],
    )


trainer(15).train()
print(trainer(30).train(resume_from_checkpoint=True).training_loss)
