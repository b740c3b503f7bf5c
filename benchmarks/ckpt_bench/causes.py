"""What is planted: one cause at a time in the state dict of a model, and what the first line must then say."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from benchmarks.ckpt_bench.models import DIM, GROUPS, HEADS, HIDDEN, LAYERS, State

OUT = (
    r"(o_proj|attn\.c_proj|attention\.output\.dense|SelfAttention\.o|self_attn\.out_proj|mixer\.out_proj|attention\.dense)"
    r"\.weight"
)
DOWN = (
    r"(down_proj|\bw2|mlp\.c_proj|(?<!attention\.)\boutput\.dense|DenseReluDense\.wo|\bfc2|dense_4h_to_h|mixer\.x_proj)\.weight"
)
NORM = r"(norm|norm\d|norm_f|ln_\w+|LayerNorm|layernorm\w*|layer_norm)\.weight"


def keys(state: State, pattern: str) -> list[str]:
    """Return the names that a pattern finds."""
    return [name for name in state if re.search(pattern, name)]


def swap(state: State, pairs: list[tuple[str, str]]) -> bool:
    for one, other in pairs:
        state[one], state[other] = state[other], state[one]
    return bool(pairs)


def layer(s: State, number: int) -> dict[str, str]:
    """Return the tensors of a layer (of the encoder, where there is one beside a decoder) by their names without its number."""
    numbered = re.compile(rf"\b(layers?|h|block)\.{number}\.")
    first = {k: re.search(r"\b(layers?|h|block)\.\d+\.", k) for k in s}
    found = {k: m for k, m in first.items() if m and numbered.fullmatch(m[0])}
    if any("encoder" in k for k in found):
        found = {k: m for k, m in found.items() if "decoder" not in k}
    return {k[: m.start()] + "*" + k[m.end() :]: k for k, m in found.items()}


def _common(s: State) -> list[list[str]]:
    """Return the names of the parameters that all layers have in one shape, a list a layer."""
    layers = [layer(s, i) for i in range(LAYERS)]
    names = [n for n in layers[0] if all(n in one and s[one[n]].shape == s[layers[0][n]].shape for one in layers)]
    return [[one[n] for n in names] for one in layers]


def exchanged_layers(s: State) -> bool:
    first, _, last = _common(s)
    return swap(s, list(zip(first, last, strict=True)))


def shifted_layers(s: State) -> bool:
    layers = _common(s)
    held = [[s[k] for k in one] for one in layers]
    for number, one in enumerate(layers):
        for name, value in zip(one, held[(number + 1) % LAYERS], strict=True):
            s[name] = value
    return bool(layers[0])


def exchanged_gates(s: State) -> bool:
    pairs = (("gate_proj", "up_proj"), (".w1.", ".w3."), (".wi_0.", ".wi_1."))
    fused = keys(s, r"gate_up_proj")
    for k in fused:
        s[k] = torch.cat(s[k].chunk(2)[::-1])
    return bool(fused) or any(swap(s, [(k, k.replace(a, b)) for k in s if a in k]) for a, b in pairs)


def rotary(s: State) -> bool:
    found = keys(s, r"[qk]_proj\.weight") if "model.norm.weight" in s else []
    for k in found:
        s[k] = s[k].view(-1, 2, DIM // 2, HIDDEN).transpose(1, 2).reshape(s[k].shape).contiguous()
    return bool(found)


def by_group(s: State) -> bool:
    """Fuse by query group, and split as all q, all k, all v."""
    found = keys(s, r"q_proj\.weight") if "model.norm.weight" in s else []
    for name in found:
        q, k, v = (s[name.replace("q_proj", f"{p}_proj")] for p in "qkv")
        share = HEADS // GROUPS
        fused = torch.cat([p.view(GROUPS, -1, HIDDEN) for p in (q, k, v)], 1).reshape(-1, HIDDEN)
        assert fused.shape[0] == (share + 2) * GROUPS * DIM
        for part, value in zip("qkv", fused.split([len(q), len(k), len(v)]), strict=True):
            s[name.replace("q_proj", f"{part}_proj")] = value.clone()
    return bool(found)


def exchanged_qk(s: State) -> bool:
    return swap(s, [(k, k.replace("k_proj", "v_proj")) for k in keys(s, r"k_proj\.weight")]) or swap(
        s, [(k, k.replace(".k.", ".v.")) for k in keys(s, r"SelfAttention\.k\.weight")]
    )


def router(s: State) -> bool:
    found = keys(s, r"(mlp\.gate|block_sparse_moe\.gate)\.weight")
    for k in found:
        s[k] = s[k].roll(1, 0)
    return bool(found)


def experts(s: State) -> bool:
    return swap(s, [(k, k.replace("experts.0.", "experts.2.")) for k in keys(s, r"layers\.1\..*experts\.0\.")])


def centred(s: State) -> bool:
    found = [k for k in keys(s, NORM) if s[k].ndim == 1]
    for k in found:
        s[k] = s[k] - 1
    return bool(found)


def factor(s: State) -> bool:
    found = keys(s, OUT)
    for k in found:
        s[k] = s[k] * 0.25
    return bool(found)


def turned(s: State) -> bool:
    found = keys(s, DOWN)
    for k in found:
        s[k] = s[k].T.contiguous()
    return bool(found)


def one_element(s: State) -> bool:
    name = keys(s, rf"\.1\..*{DOWN}")[0]
    s[name] = s[name].clone()
    s[name][3, 5] += 1
    return True


def not_finite(s: State) -> bool:
    name = keys(s, rf"\.2\..*{OUT}")[0]
    s[name] = s[name].clone()
    s[name][0, 1] = float("nan")
    return True


def zeroed(s: State) -> bool:
    name = keys(s, rf"\.0\..*{OUT}")[0]
    s[name] = torch.zeros_like(s[name])
    return True


def lost(s: State) -> bool:
    del s[keys(s, rf"\.1\..*{OUT}")[0]]
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


def through_bfloat16(s: State) -> bool:
    for k, value in s.items():
        s[k] = value.bfloat16().float() if value.is_floating_point() else value
    return True


def fresh_layer(s: State) -> bool:
    """Initialise a layer anew, as a loader leaves one whose names it did not find."""
    generator = torch.Generator().manual_seed(99)
    for k in layer(s, 1).values():
        s[k] = torch.randn(s[k].shape, generator=generator) * 0.02 if s[k].ndim > 1 else s[k].mean().expand_as(s[k]).clone()
    return True


def merged(s: State) -> bool:
    generator = torch.Generator().manual_seed(7)
    found = keys(s, OUT)
    for k in found:
        rows, columns = s[k].shape
        s[k] = s[k] + 0.1 * torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
    return bool(found)


def negative(s: State) -> bool:
    found = keys(s, DOWN)
    for k in found:
        s[k] = -s[k]
    return bool(found)


def other_rows(s: State) -> bool:
    """Shift the rows of the embedding by one: another tokenizer."""
    found = keys(s, r"(embed_tokens|wte|word_embeddings|embed_in|^shared|embeddings)\.weight")
    for k in found[:1]:
        s[k] = s[k].roll(1, 0)
    return bool(found)


MORE_CAUSES: dict[str, tuple[Callable[[State], bool], str]] = {
    "bfloat16": (through_bfloat16, r"bfloat16"),
    "a layer made anew": (fresh_layer, r"only layer 1"),
    "a low-rank update": (merged, r"rank 2"),
    "a sign": (negative, r"-1 times as large in B"),
    "rows of the embedding shifted": (
        other_rows,
        r"(order of|by one|earlier|later).* rows|rows .*(order|by one|earlier|later)",
    ),
}
