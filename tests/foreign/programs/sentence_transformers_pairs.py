"""In-batch negatives: several forwards of one encoder for each loss."""

import os
from pathlib import Path

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

encoder = Transformer(os.environ["DATA"] + "/tinybert")
model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())], device="cpu")
lines = Path(os.environ["DATA"], "text.txt").read_text().split("\n")[:200]
arguments = SentenceTransformerTrainingArguments(
    os.environ["OUT"],
    num_train_epochs=1,
    per_device_train_batch_size=8,
    use_cpu=True,
    report_to=[],
    warmup_steps=2,
    logging_steps=2,
)
pairs = Dataset.from_dict({"anchor": lines, "positive": lines[::-1]})
SentenceTransformerTrainer(model, arguments, pairs, loss=losses.MultipleNegativesRankingLoss(model)).train()
