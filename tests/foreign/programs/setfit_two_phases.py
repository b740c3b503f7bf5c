"""A contrastive phase with Hugging Face's Trainer, then SetFit's own loop from end to end."""

import os

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from setfit import SetFitModel, Trainer, TrainingArguments
from setfit.modeling import SetFitHead

encoder = Transformer(os.environ["DATA"] + "/tinybert")
width = encoder.get_embedding_dimension()
body = SentenceTransformer(modules=[encoder, Pooling(width)], device="cpu")
model = SetFitModel(body, SetFitHead(in_features=width, out_features=2))
rows = Dataset.from_dict({"text": ["alpha beta", "alpha", "gamma", "gamma delta"] * 2, "label": [0, 0, 1, 1] * 2})
arguments = TrainingArguments(output_dir=os.environ["OUT"], num_epochs=(1, 4), batch_size=(4, 4), end_to_end=True, report_to=[])
Trainer(model, arguments, train_dataset=rows).train()
