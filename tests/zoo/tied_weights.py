"""A GPT whose output head is its embedding: one parameter under two names, with two gradient contributions."""

from tests.zoo.residual_gpt import batch as batch
from tests.zoo.residual_gpt import loss as loss
from trainprobe.demo.gpt import GPT, Shape


def build():
    return GPT(Shape(layers=2, width=16, heads=2, context=8, vocabulary=11, tied_head=True))
