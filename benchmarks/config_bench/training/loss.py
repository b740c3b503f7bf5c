"""The loss."""

from torch.nn import functional


def token_loss(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
