"""Diffusion with an averaged model, accumulation inside Accelerate, and samples drawn in between."""

import os

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

torch.manual_seed(0)
diffusion = GaussianDiffusion(
    Unet(dim=8, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=10, sampling_timesteps=2
)
Trainer(
    diffusion,
    os.environ["DATA"] + "/img",
    train_batch_size=8,
    gradient_accumulate_every=2,
    train_num_steps=12,
    save_and_sample_every=10,
    num_samples=4,
    calculate_fid=False,
    results_folder=os.environ["OUT"],
).train()
