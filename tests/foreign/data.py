"""Makes the data that the programs train on: small, the same on every machine, nothing fetched."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
import struct
import sys
from pathlib import Path

WORDS = ("alpha", "beta", "gamma", "delta", "river", "stone", "north", "light")


def make(folder: Path) -> None:
    """Write all data below `folder`, unless they are there; of several processes one writes, and the others wait for it."""
    if (folder / "done").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left
            for part in (_text, _mnist, _pictures, _names, _models, _dialogues):
                part(folder, random.Random(part.__name__))
            (folder / "done").touch()


def _text(folder: Path, chance: random.Random) -> None:
    text = "\n".join(" ".join(chance.choices(WORDS, k=12)) for _ in range(400)) + "\n"
    for path in (folder / "text.txt", folder / "lmdata" / "wikitext-2.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _mnist(folder: Path, chance: random.Random) -> None:
    """Digits that are a bright bar each, in MNIST's own four files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for kind, count in (("train", 1280), ("t10k", 256)):
        labels = [i % 10 for i in range(count)]
        pixels = bytearray()
        for label in labels:
            for row in range(28):
                bright = 200 if row // 3 == label else 0
                pixels += bytes(bright + chance.randrange(50) for _ in range(28))
        (raw / f"{kind}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + bytes(pixels))
        (raw / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + bytes(labels))
        for file in (f"{kind}-images-idx3-ubyte.gz", f"{kind}-labels-idx1-ubyte.gz"):
            (raw / file).touch()  # torchvision asks only whether they are there


def _pictures(folder: Path, chance: random.Random) -> None:
    from PIL import Image

    def picture(path: Path, size: int, red: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = bytes(v for _ in range(size * size) for v in (red, chance.randrange(256), chance.randrange(256)))
        Image.frombytes("RGB", (size, size), noise).save(path)

    for i in range(128):
        picture(folder / "img" / f"{i:03}.png", 64, i)
    for split, count in (("train", 16), ("val", 4)):
        for name, red in (("a", 40), ("b", 200)):
            for i in range(count):
                picture(folder / "cls" / split / name / f"{i}.png", 64, red)


def _names(folder: Path, chance: random.Random) -> None:
    (folder / "names").mkdir()
    for language, letters in (("A", "abcdefg"), ("B", "hijklmn"), ("C", "opqrstu")):
        words = ["".join(chance.choices(letters, k=6)).title() for _ in range(60)]
        (folder / "names" / f"{language}.txt").write_text("\n".join(words) + "\n")


def _models(folder: Path, chance: random.Random) -> None:
    """A Llama and a BERT of two layers with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = {letter: len(special) + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = {**{name: i for i, name in enumerate(special)}, **letters}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=128,
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    torch.manual_seed(chance.randrange(1000))
    same = {"vocab_size": len(vocabulary), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    same |= {"num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0}
    for name, model in (
        ("tinylm", LlamaForCausalLM(LlamaConfig(**same, bos_token_id=1, eos_token_id=2))),
        ("tinybert", BertModel(BertConfig(**same))),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _dialogues(folder: Path, chance: random.Random) -> None:
    """Rows as trl expects them for each of its trainers."""

    def words(count: int) -> str:
        return " ".join(chance.choices(WORDS, k=count))

    rows = {
        "sft": lambda: {"text": words(6)},
        "pref": lambda: {"prompt": words(3), "chosen": " " + words(3), "rejected": " " + words(2)},
        "prefi": lambda: {"chosen": words(5), "rejected": words(4)},
        "kto": lambda: {"prompt": words(3), "completion": " " + words(3), "label": chance.random() < 0.5},
        "promptc": lambda: {"prompt": [{"role": "user", "content": words(3)}]},
    }
    for name, row in rows.items():
        (folder / name).mkdir()
        for split, count in (("train", 64), ("test", 8)):
            text = "".join(json.dumps(row()) + "\n" for _ in range(count))
            (folder / name / f"{split}.jsonl").write_text(text)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
