"""LoRA as PEFT's examples train it: a loop of one's own, warm-up from a rate of zero, gradient checkpointing, evaluation."""

import os

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(os.environ["DATA"] + "/tinylm")
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, lora_dropout=0.1))
model.print_trainable_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=60)
batches = [torch.randint(0, 200, (4, 16)) for _ in range(20)]
for epoch in range(3):
    model.train()
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        print(epoch, float(model(input_ids=batches[0], labels=batches[0]).loss))
