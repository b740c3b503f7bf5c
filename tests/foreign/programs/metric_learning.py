"""Two models and a loss with weights of its own: three optimizers step after each backward."""

import torch
from pytorch_metric_learning import losses, samplers, trainers

torch.manual_seed(0)
trunk, embedder, loss = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4), losses.ArcFaceLoss(4, 4)
labels = torch.arange(128) % 4
rows = [(torch.randn(8) + labels[i], int(labels[i])) for i in range(128)]
optimizers = {"trunk_optimizer": trunk, "embedder_optimizer": embedder, "metric_loss_optimizer": loss}
trainers.MetricLossOnly(
    models={"trunk": trunk, "embedder": embedder},
    optimizers={name: torch.optim.Adam(module.parameters()) for name, module in optimizers.items()},
    batch_size=16,
    loss_funcs={"metric_loss": loss},
    dataset=rows,
    sampler=samplers.MPerClassSampler(labels, 4, length_before_new_iter=128),
    dataloader_num_workers=0,
    data_device="cpu",
).train(num_epochs=3)
