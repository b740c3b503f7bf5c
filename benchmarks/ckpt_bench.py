"""Planted causes: does the first line of ckpt-compare name what is wrong, and does it stay quiet where nothing is?

    python -m benchmarks.ckpt_bench [--folder DIR] [--only PATTERN]

Models of transformers, made from tiny configurations, are saved by `save_pretrained`. Each cause is planted alone in a copy of
a model, which is then written in another layout: one safetensors file, shards with an index, torch.save in both of its formats,
a distributed checkpoint, and Megatron-LM's legacy folder with fused attention and gates. The first line must match the cause's
pattern. The same models without a cause, in all layouts, must be identical. Prints a table and exits with 1 below the goal of
90 % named and 0 false.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from trainprobe.ckpt_compare.compare import compare, logical
from trainprobe.ckpt_compare.conclusion import Conclusion, conclude
from trainprobe.ckpt_compare.formats import open_checkpoint

State = dict[str, torch.Tensor]
HEADS, GROUPS, DIM, HIDDEN, FFN, LAYERS, VOCAB = 4, 2, 10, 40, 56, 3, 61
GOAL = 0.9


def models() -> dict[str, Callable[[], object]]:
    """Return name → how to make a model."""
    import transformers as t

    llama = {
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "head_dim": DIM, "vocab_size": VOCAB, "tie_word_embeddings": False,
    }  # fmt: skip
    bert = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**llama)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**{**llama, "tie_word_embeddings": True})),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**llama, num_local_experts=3)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCAB)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**bert, vocab_size=VOCAB)),
    }


def saved(name: str, make: Callable[[], object], folder: Path) -> Path:
    """Save a model by its own `save_pretrained`, with values that are nowhere equal; return the folder."""
    torch.manual_seed(len(name))
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():  # pyright: ignore[reportAttributeAccessIssue]
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder / name)  # pyright: ignore[reportAttributeAccessIssue]
    return folder / name


def keys(state: State, pattern: str) -> list[str]:
    """Return the names that a pattern finds."""
    return [name for name in state if re.search(pattern, name)]


def swap(state: State, pairs: list[tuple[str, str]]) -> bool:
    for one, other in pairs:
        state[one], state[other] = state[other], state[one]
    return bool(pairs)


def exchanged_layers(s: State) -> bool:
    return swap(s, [(k, re.sub(r"\b0\b", "2", k, count=1)) for k in keys(s, r"(layers?|h)\.0\.")])


def shifted_layers(s: State) -> bool:
    layers = [sorted(keys(s, rf"(layers?|h)\.{i}\.")) for i in range(LAYERS)]
    first = [s[k] for k in layers[0]]
    for i in range(LAYERS - 1):
        for to, source in zip(layers[i], layers[i + 1], strict=True):
            s[to] = s[source]
    for to, value in zip(layers[-1], first, strict=True):
        s[to] = value
    return bool(layers[0])


def exchanged_gates(s: State) -> bool:
    return swap(s, [(k, k.replace("gate_proj", "up_proj")) for k in keys(s, r"gate_proj")]) or swap(
        s, [(k, k.replace(".w1.", ".w3.")) for k in keys(s, r"\.w1\.")]
    )


def rotary(s: State) -> bool:
    found = keys(s, r"[qk]_proj\.weight")
    for k in found:
        s[k] = s[k].view(-1, 2, DIM // 2, HIDDEN).transpose(1, 2).reshape(s[k].shape).contiguous()
    return bool(found)


def by_group(s: State) -> bool:
    """Fuse by query group, and split as all q, all k, all v."""
    found = keys(s, r"q_proj\.weight")
    for name in found:
        q, k, v = (s[name.replace("q_proj", f"{p}_proj")] for p in "qkv")
        share = HEADS // GROUPS
        fused = torch.cat([p.view(GROUPS, -1, HIDDEN) for p in (q, k, v)], 1).reshape(-1, HIDDEN)
        assert fused.shape[0] == (share + 2) * GROUPS * DIM
        for part, value in zip("qkv", fused.split([len(q), len(k), len(v)]), strict=True):
            s[name.replace("q_proj", f"{part}_proj")] = value.clone()
    return bool(found)


def exchanged_qk(s: State) -> bool:
    return swap(s, [(k, k.replace("k_proj", "v_proj")) for k in keys(s, r"k_proj\.weight")])


def router(s: State) -> bool:
    found = keys(s, r"(mlp\.gate|block_sparse_moe\.gate)\.weight")
    for k in found:
        s[k] = s[k][[2, 0, 1]].clone()
    return bool(found)


def experts(s: State) -> bool:
    return swap(s, [(k, k.replace("experts.0.", "experts.2.")) for k in keys(s, r"layers\.1\..*experts\.0\.")])


def centred(s: State) -> bool:
    found = [k for k in keys(s, r"(norm|ln_\w+|LayerNorm)\.weight") if s[k].ndim == 1]
    for k in found:
        s[k] = s[k] - 1
    return bool(found)


def factor(s: State) -> bool:
    found = keys(s, r"(o_proj|attn\.c_proj|attention\.output\.dense)\.weight")
    for k in found:
        s[k] = s[k] * 0.25
    return bool(found)


def turned(s: State) -> bool:
    found = keys(s, r"(down_proj|\.w2|mlp\.c_proj|layer\.\d+\.output\.dense)\.weight")
    for k in found:
        s[k] = s[k].T.contiguous()
    return bool(found)


def one_element(s: State) -> bool:
    name = keys(s, r"\.1\..*(down_proj|\.w2|mlp\.c_proj|output\.dense)\.weight")[0]
    s[name] = s[name].clone()
    s[name][3, 5] += 1
    return True


def not_finite(s: State) -> bool:
    name = keys(s, r"\.2\..*(o_proj|attn\.c_proj|attention\.output\.dense)\.weight")[0]
    s[name] = s[name].clone()
    s[name][0, 1] = float("nan")
    return True


def zeroed(s: State) -> bool:
    name = keys(s, r"\.0\..*(o_proj|attn\.c_proj|attention\.output\.dense)\.weight")[0]
    s[name] = torch.zeros_like(s[name])
    return True


def lost(s: State) -> bool:
    del s[keys(s, r"\.1\..*(o_proj|attn\.c_proj|attention\.output\.dense)\.weight")[0]]
    return True


CAUSES: dict[str, tuple[Callable[[State], bool], str]] = {
    "layers 0 and 2 exchanged": (exchanged_layers, r"layers 0 and 2 are exchanged"),
    "layers shifted by one": (shifted_layers, r"layers 0, 1 and 2 of B hold layers 1, 2 and 0 of A"),
    "gate and up exchanged": (exchanged_gates, r"gate and up are exchanged in \d+ (layers|experts)"),
    "other rotary order": (rotary, r"other rotary order: halves in A, interleaved pairs in B \(heads of 10\)"),
    "fused by group, split in blocks": (by_group, r"q, k and v hold each other's rows"),
    "k and v exchanged": (exchanged_qk, r"k and v are exchanged"),
    "router's rows permuted": (router, r"another order of rows of the router"),
    "two experts exchanged": (experts, r"experts 0 and 2 (of layer 1 )?are exchanged"),
    "norms off by one": (centred, r"zero-centred in B"),
    "a factor of 0.25": (factor, r"0\.25 times as large in B"),
    "transposed": (turned, r"transposed in B"),
    "one element": (one_element, r"1 of \d+ tensors; worst is .*(1\.).*1 of [\d,]+ elements"),
    "a NaN": (not_finite, r"1 of \d+ tensors; worst is .*2\..*NaN"),
    "all zeros": (zeroed, r"1 of \d+ tensors; worst is .*0\.|all zeros"),
    "a tensor lost": (lost, r"1 tensors? (are|is) only in A.*1\."),
}


def write(layout: str, state: State, source: Path, path: Path) -> bool:
    """Write a state in a layout beside the configuration of its model; return False where the layout has no such model."""
    path.mkdir(parents=True)
    if layout != "megatron":
        (path / "config.json").write_text((source / "config.json").read_text())
    if layout == "safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, path / "model.safetensors", {"format": "pt"})
    elif layout == "shards":
        names, index = list(state), {}
        for i in range(3):
            part = {k: state[k].contiguous() for k in names[i::3]}
            save_file(part, path / f"model-{i}.safetensors", {"format": "pt"})
            index |= dict.fromkeys(part, f"model-{i}.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    elif layout in ("bin", "old"):
        torch.save(state, path / "pytorch_model.bin", _use_new_zipfile_serialization=layout == "bin")
    elif layout == "dcp":
        dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    else:
        return write_megatron(state, path)
    return True


def write_megatron(state: State, path: Path) -> bool:
    """Write a Llama as Megatron-LM keeps it on one rank: q, k and v interleaved by query group, gate and up in one matrix."""
    if "model.layers.0.mlp.gate_proj.weight" not in state or keys(state, r"bias|feedforward"):
        return False
    model: State = {"embedding.word_embeddings.weight": state["model.embed_tokens.weight"]}
    straight = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj",
                "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}  # fmt: skip
    for i in range(LAYERS):
        ours, theirs = f"model.layers.{i}.", f"decoder.layers.{i}."
        model |= {
            f"{theirs}{a}.weight": state[f"{ours}{b}.weight"] for a, b in straight.items() if f"{ours}{b}.weight" in state
        }
        groups = [state[f"{ours}self_attn.{p}_proj.weight"].view(GROUPS, -1, HIDDEN) for p in "qkv"]
        model[f"{theirs}self_attention.linear_qkv.weight"] = torch.cat(groups, 1).reshape(-1, HIDDEN)
        model[f"{theirs}mlp.linear_fc1.weight"] = torch.cat([state[f"{ours}mlp.{p}_proj.weight"] for p in ("gate", "up")])
    model |= {"decoder.final_layernorm.weight": state["model.norm.weight"], "output_layer.weight": state["lm_head.weight"]}
    args = SimpleNamespace(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
                           kv_channels=DIM, swiglu=True, untie_embeddings_and_output_weights=True)  # fmt: skip
    (path / "mp_rank_00").mkdir()
    torch.save({"args": vars(args), "model": model, "iteration": 1}, path / "mp_rank_00" / "model_optim_rng.pt")
    return True


LAYOUTS = ("safetensors", "shards", "bin", "old", "dcp", "megatron")


def judged(a: Path, b: Path) -> Conclusion:
    """Compare two checkpoints as the command does."""
    return conclude(compare(*logical(open_checkpoint(a), open_checkpoint(b))))


def pairs(folder: Path, only: str) -> Iterator[tuple[str, str, str, bool, str]]:
    """Yield model, layout, cause (empty: healthy), whether the answer is right, and the first line."""
    for name, make in models().items():
        source = saved(name, make, folder)
        held = load_file(source / "model.safetensors")
        for number, layout in enumerate(LAYOUTS):
            path = folder / f"{name}-{layout}"
            if fnmatch.fnmatch(name, only) and write(layout, held, source, path):
                found = judged(source, path)
                yield name, layout, "", found.code == 0, found.sentence
            for place, (cause, (plant, pattern)) in enumerate(CAUSES.items()):
                if place % 3 != number % 3 or not fnmatch.fnmatch(name, only):
                    continue  # each cause in a third of the layouts
                state = dict(held)
                path = folder / f"{name}-{layout}-{place}"
                if plant(state) and write(layout, state, source, path):
                    found = judged(source, path)
                    yield name, layout, cause, found.code > 1 and bool(re.search(pattern, found.sentence)), found.sentence


def main() -> int:
    """Run all pairs, print what was missed and a table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="*", help="models whose name matches this pattern")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        for model, layout, cause, good, sentence in pairs(Path(made), given.only):
            total[cause] += 1
            right[cause] += good
            if not good:
                print(f"{model}, {layout}, {cause or 'healthy'}: {sentence}", flush=True)
    for cause in total:
        print(f"| {cause or 'nothing planted'} | {right[cause]} of {total[cause]} |")
    planted = sum(total.values()) - total[""]
    named = sum(right.values()) - right[""]
    print(f"{named} of {planted} causes named in the first line, {total[''] - right['']} of {total['']} healthy pairs accused")
    return int(named < GOAL * planted or right[""] < total[""])


if __name__ == "__main__":
    sys.exit(main())
