"""An engine's prefill and decode steps against one forward of a trainer: real models of transformers, joined along tokens."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.rollout.layers import NEW, PROMPT, decode, fuse, made, packed, record, roll_cache, text
from trainprobe.cli import main
from trainprobe.dump_compare.along_tokens import compare_along_tokens
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.pairing import ranks_of
from trainprobe.dump_compare.renamed.token_rows import Tokens, TokenSide, passes_of
from trainprobe.engine.core.step_data import slots
from trainprobe.errors import CompareError

WHOLE = PROMPT + NEW


def side_of(folder: Path) -> Side:
    return Side(next(iter(next(iter(ranks_of(folder).values())).values())))


@pytest.fixture(scope="module")
def llama():
    return made("llama", 3)


def test_joined_rows_are_what_hooks_saw_of_each_token(llama, tmp_path):
    ids, seen = text(4, length=WHOLE), []
    layer = llama.model.layers[2].mlp
    hook = layer.register_forward_hook(lambda _, __, out: seen.append(out.detach().clone()))
    record(tmp_path / "engine", llama, lambda: decode(llama, ids))
    hook.remove()
    expected = torch.cat(seen, 1)[0]
    side = side_of(tmp_path / "engine")
    passes = passes_of(side)
    assert [each.ids.shape for each in passes] == [(1, PROMPT), *[(1, 1)] * NEW]
    assert np.concatenate([each.ids[0] for each in passes]).tolist() == ids[0].tolist()
    order = np.random.default_rng(0).permutation(WHOLE)
    of = np.array([0] * PROMPT + list(range(1, NEW + 1)))
    at = np.array([*range(PROMPT), *[0] * NEW])
    joined = TokenSide(side, Tokens(passes, of[order], at[order], np.ones(WHOLE, bool)))
    call = next(call for call in joined.step_data.calls if call.name == "model.layers.2.mlp")
    value = dict(slots(call))["output"]
    array = joined.array(value)
    assert array is not None
    assert value.shape == (WHOLE, 64)
    assert np.array_equal(array, expected.numpy()[order])
    assert joined.numbers(value) == pytest.approx(
        {
            "norm": np.linalg.norm(expected.double().numpy()),
            "max": expected.max().item(),
            "min": expected.min().item(),
            "mean": expected.double().mean().item(),
        }
    )


def test_a_packed_text_is_found_among_others_and_agrees(llama, tmp_path):
    texts = [text(10 + i, length=WHOLE) for i in range(3)]
    record(tmp_path / "engine", llama, lambda: decode(llama, texts[1]))
    record(tmp_path / "trainer", llama, lambda: packed(llama, texts))
    ranks, verdict = compare_along_tokens(tmp_path / "engine", tmp_path / "trainer")
    assert verdict.code == 1
    assert f"compared along {WHOLE} tokens: A has {NEW + 1} forwards of the model, B 1" in verdict.details
    logits = next(one for one in ranks[0].calls if one.call.name == "lm_head")
    assert {tuple(value.shape) for _, value in slots(logits.call)} == {(WHOLE, 64), (WHOLE, 128), (128, 64)}


def test_of_generate_the_logits_of_the_last_token_of_the_prompt_are_compared(llama, tmp_path):
    prompt = text(5)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        whole = llama.generate(prompt, **options)
    record(tmp_path / "engine", llama, lambda: llama.generate(prompt, **options))
    record(tmp_path / "trainer", llama, lambda: llama(whole))
    ranks, verdict = compare_along_tokens(tmp_path / "engine", tmp_path / "trainer")
    assert verdict.code == 1
    logits = next(one for one in ranks[0].calls if one.call.name == "lm_head")
    assert dict(slots(logits.call))["output"].shape == (NEW, 128)  # the last token that it wrote was never fed
    assert all(one.outcome in ("identical", "rounding", "carried") for one in ranks[0].calls)


def test_a_fused_engine_with_a_wrong_cache_is_named_at_the_token(llama, tmp_path, capsys, monkeypatch):
    ids = text(6, length=WHOLE)
    engine = fuse(copy.deepcopy(llama))
    record(tmp_path / "engine", engine, lambda: decode(engine, ids, spoil=roll_cache(1)))
    record(tmp_path / "trainer", llama, lambda: llama(ids))
    monkeypatch.setenv("COLUMNS", "1000")
    sides = [str(tmp_path / "engine"), str(tmp_path / "trainer")]
    code = main(["rollout-compare", *sides, "--json", str(tmp_path / "all.json"), "--html", str(tmp_path / "page.html")])
    said = " ".join(capsys.readouterr().out.split())
    assert code == 2
    assert "first difference is at Module.model.layers.1.self_attn.LlamaAttention.forward.0" in said
    assert any(f"token {PROMPT + step} of text 0" in said for step in range(2, NEW))
    assert "LlamaAttention" in (tmp_path / "all.json").read_text()
    assert "LlamaAttention" in (tmp_path / "page.html").read_text()
    assert main(["rollout-compare", *sides, "--floor", sides[0]]) == 3
    assert "--floor is of folders of key data" in " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_joined_is_said(llama, tmp_path):
    ids = text(7, length=WHOLE)
    record(tmp_path / "engine", llama, lambda: decode(llama, ids))
    record(tmp_path / "other", llama, lambda: llama(text(8, length=WHOLE)))
    with pytest.raises(CompareError, match="no row of B has the text of A, 16 tokens that begin with"):
        compare_along_tokens(tmp_path / "engine", tmp_path / "other")
    import trainprobe

    with (
        trainprobe.watch(llama, output=str(tmp_path / "numbers"), console=False, record="L0", monitor=False) as probe,
        torch.no_grad(),
        probe.step(),
    ):
        llama(ids)
    with pytest.raises(CompareError, match="record with task: tensor"):
        compare_along_tokens(tmp_path / "engine", tmp_path / "numbers")
    record(tmp_path / "none", llama.lm_head, lambda: llama.lm_head(torch.ones(3, 64)))
    with pytest.raises(CompareError, match=r"no module in .* is given tokens"):
        compare_along_tokens(tmp_path / "engine", tmp_path / "none")
