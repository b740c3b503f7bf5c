"""Lines of text as tokens; now and then a character is dropped at random."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset

PAD = 0
LONGEST = 48


def encode(text):
    return [1 + (ord(c) - 32) % 63 for c in text.lower()]


class Lines(Dataset):
    def __init__(self, path):
        with open(path) as file:
            self.lines = file.read().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        text = "".join(c for c in self.lines[index] if random.random() >= 0.02)
        if np.random.rand() < 0.1:
            text = text.upper()
        return torch.tensor(encode(text)[:LONGEST])


def collate(samples):
    length = max(map(len, samples))
    ids = torch.full((len(samples), length), PAD)
    mask = torch.zeros(len(samples), length)
    labels = torch.full((len(samples), length), -100)
    for row, tokens in enumerate(samples):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens) - 1] = tokens[1:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def seed_worker(worker):
    random.seed(100 + worker)
    np.random.seed(200 + worker)
