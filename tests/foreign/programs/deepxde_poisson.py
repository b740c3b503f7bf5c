"""A physics-informed net: gradients of gradients, Adam with a closure, then one long step of L-BFGS."""

import deepxde as dde
import numpy as np

dde.config.set_random_seed(0)
line = dde.geometry.Interval(-1, 1)


def poisson(x, y):
    return dde.grad.hessian(y, x) + np.pi**2 * dde.backend.sin(np.pi * x)


edge = dde.icbc.DirichletBC(line, lambda x: 0, lambda x, on_edge: on_edge)
data = dde.data.PDE(line, poisson, edge, 16, 2)
model = dde.Model(data, dde.nn.FNN([1, 20, 20, 1], "tanh", "Glorot uniform"))
model.compile("adam", lr=1e-3)
model.train(iterations=200)
dde.optimizers.set_LBFGS_options(maxiter=50)
model.compile("L-BFGS")
model.train()
