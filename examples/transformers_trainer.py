"""The Hugging Face Trainer under the probe: one callback more than without.

    python examples/transformers_trainer.py

Trains a small GPT-2 from scratch for eight steps on the CPU, a full dump of step 4 included.
Everything that the probe saw is in probe_out/transformers; `trainprobe report probe_out/transformers` makes a page of it.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from trainprobe.integrations.transformers import ProbeCallback

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
text = torch.randint(0, 64, (64, 32))
probe = ProbeCallback(
    {"record": "L0", "step": 4, "sinks": ["dump", "parquet", "csv"], "monitor": {"activations": False}},
    output="probe_out/transformers",
    on_existing="replace",
)
arguments = TrainingArguments(
    output_dir="probe_out/transformers/checkpoints", use_cpu=True, max_steps=8, per_device_train_batch_size=4,
    gradient_accumulation_steps=2, logging_steps=4, save_strategy="no", report_to=[], disable_tqdm=True,
)  # fmt: skip
Trainer(
    model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in text], callbacks=[probe]
).train()

print("dump of step 4:", *probe.session.plan.output.glob("step4/rank*/dump.json"))
for finding in probe.findings:
    print(f"step {finding.step}: {finding.severity} {finding.rule}: {finding.message}")
