"""A normalizing flow for simulation-based inference, validated after each epoch."""

import torch
from sbi.inference import SNPE
from sbi.utils import BoxUniform

torch.manual_seed(0)
prior = BoxUniform(-torch.ones(2), torch.ones(2))
theta = prior.sample((200,))
inference = SNPE(prior).append_simulations(theta, theta + 0.1 * torch.randn(200, 2))
inference.train(max_num_epochs=12, training_batch_size=50)
print(inference.summary["training_loss"])
