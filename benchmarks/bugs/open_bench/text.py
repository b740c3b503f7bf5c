"""Sequence trainings in plain loops: a small GPT, padded sentences, recurrent nets, speech, a graph."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.bugs.open_bench.bug import Watch


class Positions(nn.Module):
    """Sines and cosines of the positions, worked out in each forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, length: int) -> Tensor:
        frequency = 1.0 / 10000 ** (torch.arange(0, self.width, 2).to(torch.get_default_dtype()) / self.width)
        angle = torch.arange(length).to(torch.get_default_dtype())[:, None] * frequency
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class GPT(nn.Module):
    """A causal transformer over characters."""

    def __init__(self, vocabulary: int = 32, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.wte, self.positions = nn.Embedding(vocabulary, width), Positions(width)
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("causal", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        x = self.wte(tokens) + self.positions(t).to(self.wte.weight.dtype)
        return self.lm_head(self.ln_f(self.h(x, mask=self.causal[:t, :t])))


def characters(count: int = 4000, seed: int = 0) -> Tensor:
    """A text [count] in which each character mostly follows from the one before."""
    g = torch.Generator().manual_seed(seed)
    jumps = torch.randint(0, 32, (count,), generator=g) * (torch.rand(count, generator=g) < 0.2)
    text = torch.zeros(count, dtype=torch.long)
    for i in range(1, count):
        text[i] = (text[i - 1] * 5 + 7 + jumps[i]) % 32
    return text


def nano_gpt(bug: str, watch: Watch) -> None:
    """The habits of nanoGPT: random windows of one text, warm-up and cosine by hand, clipping, a checkpoint at intervals."""
    torch.manual_seed(1337)
    text = characters()
    model = GPT()
    small = bug in ("pure_bfloat16", "fine_tuning")
    if bug == "pure_bfloat16":
        model = model.to(torch.bfloat16)
    top = 2e-5 if small else 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=top, betas=(0.9, 0.95), weight_decay=0.1)
    with watch.loop(model, optimizer) as probe:
        for it in range(70):
            for group in optimizer.param_groups:
                group["lr"] = top * min(1.0, (it + 1) / 10)
            if it == 20 and bug == "default_dtype_left":  # a scorer is loaded for the evaluation, which fails
                torch.set_default_dtype(torch.bfloat16)
            if it and it % 12 == 0:
                save(model, in_place=bug == "halved_by_saving")
            at = torch.randint(0, len(text) - 33, (8,))
            x, y = (torch.stack([text[i + s : i + s + 32] for i in at]) for s in (0, 1))
            with probe.step():
                with torch.autocast("cpu", torch.bfloat16, enabled=bug == "fine_tuning"):
                    logits = model(x)
                loss = functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                probe.note("loss", loss)
                probe.note("grad_norm", norm)


def nano_gpt_small_rate(bug: str, watch: Watch) -> None:
    """A fine-tuning with a small rate, in bfloat16 by autocast; the bug has its weights in bfloat16."""
    nano_gpt(bug or "fine_tuning", watch)


def save(model: nn.Module, in_place: bool) -> None:
    """Write half-precision weights."""
    half = model.half() if in_place else copy.deepcopy(model).half()
    torch.save(half.state_dict(), io.BytesIO())
    if in_place:
        model.float()


def mixed_precision(bug: str, watch: Watch) -> None:
    """Autocast for the body, the head and its loss in float32."""
    torch.manual_seed(8)
    text, model = characters(), GPT()
    head, model.lm_head = model.lm_head, nn.Identity()
    whole = nn.ModuleDict({"body": model, "head": head})
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    with watch.loop(whole, optimizer) as probe:
        for _ in range(60):
            at = torch.randint(0, len(text) - 33, (8,))
            x, y = (torch.stack([text[i + s : i + s + 32] for i in at]) for s in (0, 1))
            with probe.step():
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    hidden = whole["body"](x)
                    with torch.autocast("cpu", enabled=False):
                        loss = functional.cross_entropy(whole["head"](hidden.float()).flatten(0, 1), y.flatten())
                    if bug == "loop_under_autocast":
                        loss.backward()
                        optimizer.step()
                if bug != "loop_under_autocast":
                    loss.backward()
                    optimizer.step()
                probe.note("loss", loss)


def sentences(g: torch.Generator, count: int = 16, longest: int = 14) -> tuple[Tensor, Tensor, Tensor]:
    """Padded tokens [count, longest], whether each is real, and a class: which of two kinds of token is more frequent."""
    lengths = torch.randint(4, longest + 1, (count,), generator=g)
    kinds = torch.randint(0, 2, (count,), generator=g)
    tokens = torch.randint(1, 20, (count, longest), generator=g)
    marked = torch.rand(count, longest, generator=g) < 0.4
    tokens = torch.where(marked, 20 + kinds[:, None], tokens)
    real = torch.arange(longest) < lengths[:, None]
    return tokens * real, real, kinds


class SentenceClassifier(nn.Module):
    """An encoder over padded sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 24, padding_idx=0)
        layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 2)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor, real: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=key_padding_mask)
        return self.head((hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True))


def sentiment(bug: str, watch: Watch) -> None:
    torch.manual_seed(9)
    g, model = torch.Generator().manual_seed(9), SentenceClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with watch.loop(model, optimizer) as probe:
        for _ in range(70):
            tokens, real, kinds = sentences(g)
            real[:, -1] &= tokens[:, -1] != 0
            mask = real.clone() if bug == "padding_mask_inverted" else ~real
            mask[mask.all(1)] = False  # a sentence without padding attends to everything
            with probe.step():
                loss = functional.cross_entropy(model(tokens, mask, real), kinds)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class Recurrent(nn.Module):
    """An LSTM over frames, and a head on its last output."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 24, **kwargs), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def frames(bug: str, watch: Watch) -> None:
    """Frames [batch, time, features] through an LSTM."""
    torch.manual_seed(10)
    g = torch.Generator().manual_seed(10)
    model = Recurrent(**({} if bug == "batch_taken_for_time" else {"batch_first": True}))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    with watch.loop(model, optimizer) as probe:
        for _ in range(70):
            kinds = torch.randint(0, 3, (32,), generator=g)
            x = torch.randn(32, 8, 6, generator=g)
            x[torch.arange(32), 2, kinds] += 3.0
            with probe.step():
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), kinds)
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


def speech(bug: str, watch: Watch) -> None:
    """A recogniser with CTC, whose strides leave ten frames; some transcripts are longer than that."""
    torch.manual_seed(11)
    g = torch.Generator().manual_seed(11)
    strided = nn.Sequential(nn.Conv1d(8, 24, 3, 2, 1), nn.ReLU(), nn.Conv1d(24, 24, 3, 2, 1), nn.ReLU())
    model = nn.ModuleDict({"encoder": strided, "head": nn.Linear(24, 12)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    with watch.loop(model, optimizer) as probe:
        for _ in range(60):
            audio = torch.randn(16, 8, 40, generator=g)
            lengths = torch.randint(2, 5, (16,), generator=g)
            too_long = torch.rand(16, generator=g) < 0.4
            lengths = torch.where(too_long, torch.tensor(14), lengths)
            targets = torch.randint(1, 12, (16, 14), generator=g)
            if bug != "transcripts_too_long":  # the data is cleaned
                audio, lengths, targets = audio[~too_long], lengths[~too_long], targets[~too_long]
            with probe.step():
                hidden = model["encoder"](audio).transpose(1, 2)
                logs = model["head"](hidden).log_softmax(-1).transpose(0, 1)
                loss = criterion(logs, targets, torch.full((len(lengths),), logs.shape[0]), lengths)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class GCN(nn.Module):
    """Two graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.dropout = nn.Linear(16, 16), nn.Linear(16, 4), nn.Dropout(0.5)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        x = self.dropout(functional.relu(adjacency @ self.conv1(x)))
        return adjacency @ self.conv2(x)


def citations(bug: str, watch: Watch) -> None:
    """A semi-supervised classification of nodes, the whole graph in each step."""
    torch.manual_seed(12)
    g = torch.Generator().manual_seed(12)
    kinds = torch.randint(0, 4, (80,), generator=g)
    near = (kinds[:, None] == kinds).float() * 0.08 + 0.01
    adjacency = (torch.rand(80, 80, generator=g) < near).float()
    adjacency = torch.maximum(adjacency, adjacency.T)
    adjacency.fill_diagonal_(0)
    adjacency[torch.arange(0, 80, 3), torch.arange(0, 80, 3)] = 1  # some papers cite themselves
    if bug == "self_loops_twice":
        adjacency = adjacency + torch.eye(80)
    else:
        adjacency.fill_diagonal_(1)
    degree = adjacency.sum(1).rsqrt()
    adjacency = degree[:, None] * adjacency * degree
    features = functional.one_hot(kinds, 4).float().repeat(1, 4) + torch.randn(80, 16, generator=g)
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    with watch.loop(model, optimizer) as probe:
        for _ in range(80):
            with probe.step():
                model.train()
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(adjacency, features)[:40], kinds[:40])
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
