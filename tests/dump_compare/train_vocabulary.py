"""Train one step of a tiny Megatron GPT whose vocabulary is split: `train_vocabulary.py FOLDER LAYOUT…` (NAME or NAME!FAULT).

FAULT is of the last rank: another `row` of its part of the table, a `range` of words that begins one too early, wrong `logits`
of the words to be predicted, or a wrong `gradient` of the loss.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch

from tests.integrations.megatron import train as megatron_training

dist = megatron_training.dist


def put_in(fault: str, model: torch.nn.Module) -> None:
    """Plant a fault on this rank."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Loss

    table = model.get_submodule("embedding.word_embeddings")
    if fault == "row":
        with torch.no_grad():
            table.get_parameter("weight")[5] += 0.1
    if fault == "range":
        table.vocab_start_index -= 1
    if fault == "logits":
        of_words = Loss.calculate_predicted_logits

        def wrong(*given):
            target_mask, masked, predicted, *rest = of_words(*given)
            return target_mask, masked, predicted * 1.5, *rest

        Loss.calculate_predicted_logits = staticmethod(wrong)
    if fault == "gradient":
        of_loss = Loss.calculate_gradients
        Loss.calculate_gradients = staticmethod(lambda *given: of_loss(*given) * 1.5)


def main() -> None:
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        name, _, fault = layout.partition("!")
        megatron_training.prepare(name)
        training = megatron_training.Training(name)
        if fault and dist.get_rank() == dist.get_world_size() - 1:
            put_in(fault, megatron_training.bare(training.chunks[-1]))
        megatron_training.dump_step(training, Path(sys.argv[1]) / layout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
