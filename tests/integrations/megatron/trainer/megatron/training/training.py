"""The loop of Megatron-LM's `megatron/training/training.py`, cut down to what trains: what calls what, and how."""

from __future__ import annotations

import argparse
from functools import partial

import tiny_gpt
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

_ARGS = None
LOG: list[dict] = []


def get_args():
    return _ARGS


def pretrain(argv, extra_args_provider=None):
    global _ARGS
    parser = tiny_gpt.parser()
    parser.add_argument("--iteration", type=int, default=0)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    _ARGS = parser.parse_args(argv, argparse.Namespace())
    tiny_gpt.init_dist(_ARGS)
    config = tiny_gpt.make_config(_ARGS)
    model, optimizer, scheduler = setup_model_and_optimizer(config)
    LOG.clear()
    train(partial(tiny_gpt.forward_step, _ARGS), model, optimizer, scheduler, tiny_gpt.Data(_ARGS).iterator(), config)
    return model, optimizer


def setup_model_and_optimizer(config):
    model = tiny_gpt.wrap(_ARGS, config, tiny_gpt.build_chunks(_ARGS, config))
    optimizer = tiny_gpt.make_optimizer(_ARGS, model)
    tiny_gpt.sync_config(_ARGS, config, model, optimizer)
    return model, optimizer, Halving(optimizer)


class Halving:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, increment):
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def train_step(
    forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func, iteration=None
):
    for model_chunk in model:
        model_chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses_reduced = forward_backward_func(
        forward_step_func=forward_step_func, data_iterator=data_iterator, model=model, num_microbatches=_ARGS.micro,
        seq_length=_ARGS.seq, micro_batch_size=_ARGS.mbs, decoder_seq_length=_ARGS.seq, forward_only=False,
    )  # fmt: skip
    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()
    if update_successful:
        opt_param_scheduler.step(increment=_ARGS.micro * _ARGS.mbs)
    loss_dict = {"lm loss": torch.stack([row["lm loss"] for row in losses_reduced]).mean()}
    return loss_dict, int(not update_successful), False, False, 0, grad_norm, num_zeros_in_grad


def training_log(
    loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter, grad_norm, params_norm,
    num_zeros_in_grad, max_attention_logit=None, pg_collection=None, is_first_iteration=False,
):  # fmt: skip
    line = {"iteration": iteration, "loss": float(loss_dict["lm loss"]), "lr": learning_rate, "grad_norm": grad_norm}
    LOG.append(line)
    return False


def evaluate(forward_step_func, data_iterator, model, config):
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step_func, data_iterator=data_iterator, model=model, num_microbatches=1,
            seq_length=_ARGS.seq, micro_batch_size=_ARGS.mbs, decoder_seq_length=_ARGS.seq, forward_only=True,
        )  # fmt: skip


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler):
    pass


def train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator, config):
    iteration = _ARGS.iteration
    forward_backward_func = get_forward_backward_func()
    while iteration < _ARGS.steps:
        _ARGS.curr_iteration = iteration
        loss_dict, skipped_iter, _, _, _, grad_norm, num_zeros_in_grad = train_step(
            forward_step_func,
            train_data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            config,
            forward_backward_func,
            iteration=iteration,
        )
        iteration += 1
        learning_rate = optimizer.param_groups[0]["lr"]
        training_log(
            loss_dict, {}, learning_rate, iteration, optimizer.get_loss_scale().item(), False, skipped_iter, grad_norm, None,
            num_zeros_in_grad,
        )  # fmt: skip
        evaluate(forward_step_func, train_data_iterator, model, config)
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
    return iteration
