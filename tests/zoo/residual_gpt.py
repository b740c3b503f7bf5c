"""A pre-norm GPT with residual streams, a rotary position code and a dropout that draws random numbers."""

from tests.zoo import integers
from trainprobe.demo.gpt import GPT, Shape, next_token_loss


def build():
    return GPT(Shape(layers=2, width=16, heads=2, context=8, vocabulary=11, dropout=0.1, positions="rotary"))


def batch(step):
    tokens = integers(step, 11, 2, 9)
    return tokens[:, :-1], tokens[:, 1:]


def loss(model, batch):
    tokens, targets = batch
    return next_token_loss(model(tokens), targets)
