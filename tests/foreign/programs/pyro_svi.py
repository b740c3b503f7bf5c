"""Variational inference: parameters in a global store, one optimizer for each of them, no module of the user's own."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

pyro.set_rng_seed(0)
x = torch.randn(64, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(64)


def model() -> None:
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 64):
        pyro.sample("y", dist.Normal(x @ weight, 0.1), obs=y)


svi = SVI(model, AutoNormal(model), pyro.optim.ClippedAdam({"lr": 0.02}), Trace_ELBO())
print([svi.step() for _ in range(300)][-1])
