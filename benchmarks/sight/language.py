"""Programs on text: pretraining on packed documents, fine-tuning, masked and translating models, long positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainprobe
from benchmarks.sight.case import STEPS
from benchmarks.sight.parts import END, Causal, Transformer, causal, stream, text

VOCAB, TIME, IGNORED = 32, 32, -100


def packed(batch: int, draw: torch.Generator, ends: bool = True) -> tuple[Tensor, Tensor]:
    """Return rows of documents of 6 to 14 tokens behind each other, with an end token, and the number of each document."""
    rows, numbers = [], []
    for _ in range(batch):
        row: list[int] = []
        number: list[int] = []
        while len(row) < TIME + 1:
            length = int(torch.randint(6, 15, (1,), generator=draw))
            document = [*text(1, length, VOCAB, draw)[0].tolist(), *([END] if ends else [])]
            number += [number[-1] + 1 if number else 0] * len(document)
            row += document
        rows.append(row[: TIME + 1])
        numbers.append(number[: TIME + 1])
    return torch.tensor(rows), torch.tensor(numbers)


class NormalisedOverTime(nn.Module):
    """Standardises each feature over the positions of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


def pretrain(bug: str) -> None:
    """A language model on packed documents, which see themselves only."""
    torch.manual_seed(0)
    draw, model = stream(1), Transformer(VOCAB, TIME)
    if bug == "time_is_normalised":
        model.norm = NormalisedOverTime()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for step in range(STEPS):
            ids, document = packed(8, draw, ends=not (bug == "end_token_vanishes" and step >= STEPS // 2))
            inputs, targets, document = ids[:, :-1], ids[:, 1:], document[:, :-1]
            mask = (document[:, :, None] == document[:, None, :]) & causal(TIME)
            starts = torch.cummax(torch.arange(TIME) * (document.diff(dim=1, prepend=document[:, :1] - 1) != 0), 1).values
            places = torch.arange(TIME) - starts
            mask = mask[:, None]
            if bug == "documents_see_each_other":
                mask, places = causal(TIME), torch.arange(TIME)
            if bug == "mask_is_added_as_ones":
                mask = mask.float()
            with probe.step():
                logits = model(inputs, mask, places)
                if bug == "labels_shifted_twice":
                    logits, targets = logits[:, :-1], targets[:, 1:]
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


def conversations(batch: int, draw: torch.Generator, ends: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded prompts with answers [batch, TIME], the lengths of the prompts and of both together."""
    ids = torch.full((batch, TIME), VOCAB)  # the pad token
    prompts = torch.randint(4, 11, (batch,), generator=draw)
    answers = torch.randint(5, 15, (batch,), generator=draw)
    for i in range(batch):
        ids[i, : prompts[i]] = text(1, int(prompts[i]), VOCAB, draw)[0]
        said = ids[i, prompts[i] - 1] + torch.arange(1, int(answers[i]) + 1)
        ids[i, prompts[i] : prompts[i] + answers[i]] = said % (VOCAB - 1) + 1
        if ends:
            ids[i, prompts[i] + answers[i]] = END
    return ids, prompts, prompts + answers + int(ends)


def finetune(bug: str) -> None:
    """Supervised fine-tuning on answers, four micro-batches an update, divided by the number of trained tokens."""
    torch.manual_seed(0)
    draw, model = stream(2), Causal(VOCAB + 1, TIME)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    at = torch.arange(TIME)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            micro = []
            for _ in range(4):
                ids, prompts, ends = conversations(4, draw, ends=bug != "answers_without_end")
                labels = ids.clone()
                first = prompts + 1 if bug == "first_answer_token_untrained" else prompts
                labels[at < first[:, None]] = IGNORED
                if bug != "padding_is_trained":
                    labels[at >= ends[:, None]] = IGNORED
                if bug == "cut_before_the_answer":
                    ids, labels = ids[:, :6], labels[:, :6]
                micro.append((ids[:, :-1], labels[:, 1:]))
            trained = sum((labels != IGNORED).sum() for _, labels in micro)
            with probe.step():
                optimizer.zero_grad()
                total = torch.zeros(())
                for i, (ids, labels) in enumerate(micro):
                    probe.moment("micro", i)
                    if bug == "cleared_between_micro_batches":
                        optimizer.zero_grad()
                    losses = functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
                    here = (labels != IGNORED).sum() * len(micro) if bug == "mean_of_micro_means" else trained
                    loss = losses / here
                    loss.backward()
                    total += loss.detach()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                probe.note("loss", total)


def masked(bug: str) -> None:
    """A masked language model: 15 % of the tokens are hidden and guessed."""
    torch.manual_seed(0)
    draw, model, hidden = stream(3), Transformer(VOCAB + 1, TIME), VOCAB
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            ids = text(16, TIME, VOCAB, draw)
            chosen = torch.rand(ids.shape, generator=draw) < 0.15
            labels = ids if bug == "visible_tokens_trained" else ids.masked_fill(~chosen, IGNORED)
            inputs = ids if bug == "guessed_tokens_visible" else ids.masked_fill(chosen, hidden)
            with probe.step():
                loss = functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class Translator(nn.Module):
    """An encoder and a decoder of recurrent layers; the decoder reads what was said before."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB + 1, 24), nn.Embedding(VOCAB + 1, 24)
        self.encoder, self.decoder = nn.GRU(24, 32, batch_first=True), nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, VOCAB + 1)

    def forward(self, source: Tensor, said: Tensor) -> Tensor:
        _, state = self.encoder(self.source(source))
        return self.head(self.decoder(self.target(said), state)[0])


def translate(bug: str) -> None:
    """Sequences to sequences, with the right answer fed to the decoder one place later."""
    torch.manual_seed(0)
    draw, model = stream(4), Translator()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for_start = torch.full((16, 1), VOCAB)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            source = text(16, 8, VOCAB, draw)
            target = (source * 3) % (VOCAB - 1) + 1
            said = target if bug == "decoder_reads_its_target" else torch.cat([for_start, target[:, :-1]], 1)
            with probe.step():
                loss = functional.cross_entropy(model(source, said).flatten(0, 1), target.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class Rotary(nn.Module):
    """Attention of one head with rotary positions, of a language model for long rows."""

    def __init__(self, width: int, positions: torch.dtype) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.register_buffer("rates", 1.0 / 10000 ** (torch.arange(0, width, 2) / width), persistent=False)
        self.positions = positions

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        """Turn pairs of features by their positions."""
        angles = places[:, None] * self.rates.to(places.dtype)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        places = torch.arange(ids.shape[1]).to(self.positions)
        seen = functional.scaled_dot_product_attention(self.turned(q, places), self.turned(k, places), v, is_causal=True)
        return self.head(x + seen)


def rotary(bug: str) -> None:
    """A language model of 384 positions."""
    torch.manual_seed(0)
    draw, model = stream(5), Rotary(16, torch.bfloat16 if bug == "positions_in_bfloat16" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            ids = text(2, 385, VOCAB, draw)
            with probe.step():
                loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class Classifier(nn.Module):
    """Reads a padded text and classifies it by the state at one place."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(VOCAB + 1, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        states, _ = self.rnn(self.words(ids))
        return self.head(states[torch.arange(len(ids)), at])


def sentiment(bug: str) -> None:
    """Classifies texts of unequal lengths by their first words, in epochs over 640 of them."""
    torch.manual_seed(0)
    draw = stream(6)
    ids = text(640, 40, VOCAB, draw)
    lengths = torch.randint(3, 7, (640,), generator=draw)
    labels = ids[torch.arange(640), lengths - 1] % 4
    ids[torch.arange(40) >= lengths[:, None]] = VOCAB
    loader = DataLoader(TensorDataset(ids, lengths, labels), 32, shuffle=True, generator=stream(7))
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    batches = iter(loader)
    with trainprobe.watch(model, optimizer) as probe:
        for step in range(STEPS):
            if step % len(loader) == 0:
                batches = iter(loader)
            if bug == "first_batch_again":
                batches = iter(DataLoader(TensorDataset(ids, lengths, labels), 32, shuffle=True, generator=stream(7)))
            words, length, label = next(batches)
            if bug == "inputs_mixed_alone":
                order = torch.randperm(len(words))
                words, length = words[order], length[order]
            at = torch.full_like(length, 39) if bug == "padding_is_pooled" else length - 1
            with probe.step():
                loss = functional.cross_entropy(model(words, at), label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class ByteNet(nn.Module):
    """A language model of dilated convolutions."""

    def __init__(self, ahead: int = 0) -> None:
        super().__init__()
        self.ahead = ahead
        self.tokens, self.head = nn.Embedding(VOCAB, 32), nn.Conv1d(32, VOCAB, 1)
        self.layers = nn.ModuleList(nn.Conv1d(32, 32, 3, dilation=d) for d in (1, 2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).transpose(1, 2)
        for layer in self.layers:
            reach = 2 * layer.dilation[0]
            x = x + torch.relu(layer(functional.pad(x, (reach - self.ahead, self.ahead))))
        return self.head(x).transpose(1, 2)


def convolved(bug: str) -> None:
    """Characters by convolutions that look back."""
    torch.manual_seed(0)
    draw, model = stream(8), ByteNet(ahead=1 if bug == "convolution_looks_ahead" else 0)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            ids = text(16, TIME + 1, VOCAB, draw)
            inputs = ids[:, :-1]
            with probe.step():
                logits = model(inputs)
                loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class Recurrent(nn.Module):
    """A recurrent language model; its layers want the batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rnn, self.head = nn.Embedding(VOCAB, 24), nn.GRU(24, 48), nn.Linear(48, VOCAB)

    def forward(self, ids: Tensor, mixed: bool) -> Tensor:
        x = self.tokens(ids)
        seen, _ = self.rnn(x.reshape(x.shape[1], x.shape[0], -1) if mixed else x.transpose(0, 1))
        return self.head(seen.reshape(x.shape[0], x.shape[1], -1) if mixed else seen.transpose(0, 1))


def recurrent(bug: str) -> None:
    """A recurrent language model."""
    torch.manual_seed(0)
    draw, model = stream(9), Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            ids = text(16, TIME + 1, VOCAB, draw)
            with probe.step():
                loss = functional.cross_entropy(
                    model(ids[:, :-1], bug == "rows_run_together").flatten(0, 1), ids[:, 1:].flatten()
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
