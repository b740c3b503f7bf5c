"""Differentiable inner steps as in MAML: no optimizer of torch's own takes part."""

import torch
import torchopt

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
inner = torchopt.MetaSGD(model, lr=0.1)
scale = torch.nn.Parameter(torch.zeros(()))
outer = torchopt.Adam([scale], lr=0.05)
weights, state = torchopt.extract_state_dict(model, by="reference"), torchopt.extract_state_dict(inner)


def loss() -> torch.Tensor:
    return ((model(x) * (1 + scale) - y) ** 2).mean()


for _ in range(20):
    for _ in range(3):
        inner.step(loss())
    outer_loss = loss()
    outer.zero_grad()
    outer_loss.backward()
    outer.step()
    torchopt.recover_state_dict(model, weights)
    torchopt.recover_state_dict(inner, state)
print(float(outer_loss))
