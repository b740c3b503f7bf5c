"""Embeddings of a knowledge graph with negative samples; the data comes with the package."""

from pykeen.pipeline import pipeline

settings = {"num_epochs": 5, "use_tqdm": False, "use_tqdm_batch": False}
print(pipeline(dataset="nations", model="TransE", training_kwargs=settings, random_seed=0, device="cpu").losses)
