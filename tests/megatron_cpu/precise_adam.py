"""An Adam as Transformer Engine's is under Megatron's precision-aware optimizer: master weights and scaled moments of its own.

It reads `decoupled_grad`, keeps `master_param` and the moments itself (halved, for a scale), and writes the model's parameter.
"""

from __future__ import annotations

from unittest.mock import patch

import torch


class PreciseAdam(torch.optim.Optimizer):
    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-2})

    def get_unscaled_state(self, p, name):
        value = self.state[p][name]
        return value * 2 if name != "master_param" else value

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.decoupled_grad.float()
                state = self.state[p]
                if not state:
                    state["master_param"] = p.detach().float().clone()
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["exp_avg"].mul_(0.9).add_(grad, alpha=0.05)
                state["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.0005)
                state["master_param"].sub_(group["lr"] * 2 * state["exp_avg"] / ((2 * state["exp_avg_sq"]).sqrt() + 1e-8))
                p.copy_(state["master_param"])


def make_optimizer(make, *arguments):
    """Call make(*arguments) so that the distributed optimizers in it are precision-aware, and give them this Adam."""
    from megatron.core.optimizer import OptimizerConfig

    check = OptimizerConfig.__post_init__

    def aware(config):
        check(config)
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True

    with patch.object(OptimizerConfig, "__post_init__", aware):
        optimizer = make(*arguments)
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner.optimizer = PreciseAdam(inner.optimizer.param_groups)
    return optimizer
