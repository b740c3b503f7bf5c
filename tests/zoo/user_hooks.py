"""A model that brings its own hooks: forward, pre-forward, tensor and post-accumulate hooks that change values."""

from torch import nn

from tests.zoo import normal


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)
        self.first.register_forward_pre_hook(scale_inputs)
        self.first.register_forward_hook(shift_output)
        self.second.weight.register_hook(halve)
        self.second.bias.register_post_accumulate_grad_hook(clip)

    def forward(self, x):
        y = self.first(x)
        if y.requires_grad:
            y.register_hook(halve)
        return self.second(y)


def scale_inputs(module, inputs):
    return (inputs[0] * 1.5,)


def shift_output(module, inputs, output):
    return output + 0.25


def halve(gradient):
    return gradient * 0.5


def clip(parameter):
    parameter.grad.clamp_(-0.1, 0.1)


def build():
    return Hooked()


def batch(step):
    return (normal(step, 4, 6),)
