"""A Gaussian process in double precision: fitted by SciPy's L-BFGS-B without any torch optimizer, then by Adam."""

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim.fit import fit_gpytorch_mll_torch
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(0)
x = torch.rand(30, 2, dtype=torch.double)
y = torch.sin(6 * x).sum(1, keepdim=True)
model = SingleTaskGP(x, y)
fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
print(float(model.likelihood.noise))
model = SingleTaskGP(x, y)
print(fit_gpytorch_mll_torch(ExactMarginalLogLikelihood(model.likelihood, model), step_limit=50).fval)
