"""A moving average of a model that stands under one root with it.

`task`: as the training tasks of timm hold it (a copy that requires gradients, in evaluation mode, twice under the root).
`swa`: torch's AveragedModel, with running statistics. `teacher`: frozen, called in each step. Faults, all as `task`:
`left_out`: the head is in no parameter group; `written`: something writes to the model behind step 0; `rests`: from step 23 on
the model is in evaluation mode.
"""

import sys
from copy import deepcopy

import torch
from torch import nn

kind = sys.argv[1]
torch.manual_seed(0)


class Average(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = deepcopy(model)
        self.module.eval()

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for ours, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if ours.is_floating_point():
                ours.lerp_(theirs, 0.01)
            else:
                ours.copy_(theirs)


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        if kind == "swa":
            self.average = torch.optim.swa_utils.AveragedModel(self.model, avg_fn=lambda a, b, n: a.lerp(b, 0.01))
        else:
            self.wrapper = Average(self.model)
            self.average = self.wrapper.module
        if kind == "teacher":
            self.average.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        return loss + (self.model(x) - self.average(x)).square().mean() if kind == "teacher" else loss


task = Task()
trained = task.model[:4] if kind == "left_out" else task.model
optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
for step in range(60):
    if not step % 8:
        (task.model if step else task).train()
        if kind == "teacher":
            task.average.eval()
    if kind == "rests" and step == 23:
        task.eval()
    loss = task(torch.randn(32, 8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    (task.average if kind == "swa" else task.wrapper).update_parameters(task.model)
    if kind == "written" and not step:
        with torch.no_grad():
            task.model[0].weight.mul_(1.01)
    if step % 8 == 7 and kind != "rests":
        task.average.eval()
        with torch.no_grad():
            task.average(torch.randn(4, 8)) if kind != "swa" else task.average.module(torch.randn(4, 8))
