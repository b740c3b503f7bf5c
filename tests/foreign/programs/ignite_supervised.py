"""Ignite's engine with accumulation, an averaged copy of the model, a schedule and an evaluator in between."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EMAHandler, LRScheduler
from ignite.metrics import Loss

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
batches = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 16, 8)]
mse = torch.nn.functional.mse_loss
trainer = create_supervised_trainer(model, optimizer, mse, gradient_accumulation_steps=2)
evaluator = create_supervised_evaluator(model, {"loss": Loss(mse)})
EMAHandler(model).attach(trainer)
trainer.add_event_handler(Events.ITERATION_STARTED, LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 40)))
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: print(engine.state.epoch, evaluator.run(batches).metrics))
trainer.run(batches, max_epochs=6)
