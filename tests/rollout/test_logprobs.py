"""One file of log-probabilities: each cause is named from its numbers, sound engines are not accused, and all formats agree."""

from __future__ import annotations

import json
import math
import zipfile
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from trainprobe.cli import main
from trainprobe.errors import FormatError, UsageError
from trainprobe.rollout.logprobs.columns import gathered
from trainprobe.rollout.logprobs.judge import judge, statistics_of
from trainprobe.rollout.logprobs.read import read_file

ROWS, LONGEST, VOCABULARY = 32, 40, 50


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@cache
def sampled(seed=0):
    """Return logits, tokens drawn from their softmax, and the mask of responses of several lengths."""
    r = np.random.default_rng(seed)
    logits = r.normal(0, r.uniform(0.5, 5, (ROWS, LONGEST, 1)), (ROWS, LONGEST, VOCABULARY))
    tokens = (log_softmax(logits) + r.gumbel(size=logits.shape)).argmax(-1)
    mask = np.arange(LONGEST) < r.integers(12, LONGEST + 1, (ROWS, 1))
    return logits, tokens, mask


def of(logits, tokens):
    return np.take_along_axis(log_softmax(logits), tokens[..., None], -1)[..., 0]


def table(engine=None, trainer=None, **columns):
    logits, tokens, mask = sampled()
    own = of(logits, tokens)
    return {
        "tokens": tokens,
        "mask": mask.astype(np.int8),
        "trainer_logprobs": own if trainer is None else trainer,
        "engine_logprobs": own if engine is None else engine,
        **columns,
    }


def noisy(scale, seed=1):
    logits, tokens, _ = sampled()
    return of(logits, tokens) + np.random.default_rng(seed).normal(0, 1, tokens.shape) * scale


def found(columns, dtype="float32", layers=4):
    return judge(gathered(columns, "it"), dtype, layers)


def named(columns, dtype="float32"):
    answer = found(columns, dtype)
    return answer.verdict.code, answer.causes[0].name if answer.causes else ""


def test_equal_numbers_are_identical_and_small_noise_is_rounding():
    assert named(table()) == (0, "")
    assert named(table(noisy(1e-6))) == (1, "")
    assert named(table(noisy(5e-3)), "bfloat16") == (1, "")


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.25])
@pytest.mark.parametrize("known", [True, False])
def test_a_temperature_that_is_not_undone(temperature, known):
    logits, tokens, _ = sampled()
    level = log_softmax(logits)
    extra = {"entropy": -(np.exp(level) * level).sum(-1)} if known else {}
    answer = found(table(of(logits / temperature, tokens), **extra))
    assert answer.causes[0].name == "temperature"
    if known:  # the gap is (β − 1)(l + H) to first order
        assert answer.causes[0].evidence["slope"] == pytest.approx(1 / temperature - 1, rel=0.35)


def test_top_p_is_named_with_the_mass_that_it_kept():
    logits, tokens, mask = sampled()
    level = log_softmax(logits)
    order = np.argsort(-level, -1)
    before = np.cumsum(np.exp(np.take_along_axis(level, order, -1)), -1) - np.exp(np.take_along_axis(level, order, -1))
    kept = np.zeros(level.shape, bool)
    np.put_along_axis(kept, order, before < 0.8, -1)
    inside = np.take_along_axis(kept, tokens[..., None], -1)[..., 0]
    engine = of(np.where(kept, logits, -1e9), tokens)
    answer = found(table(np.where(inside, engine, 0)) | {"mask": (mask & inside).astype(np.int8)})
    assert answer.causes[0].name == "truncation"
    assert 0.8 <= answer.causes[0].evidence["least kept mass"] <= 0.85


@pytest.mark.parametrize("places", [1, -1, 2])
def test_scores_that_stand_some_places_on(places):
    columns = table()
    columns["engine_logprobs"] = np.roll(columns["engine_logprobs"], places, axis=1)
    answer = found(columns)
    assert answer.causes[0].name == "shift"
    assert answer.causes[0].evidence["lag"] == places
    assert "later" in answer.verdict.sentence if places < 0 else "earlier" not in answer.verdict.sentence or places > 0


def test_a_mask_that_begins_one_token_early_or_ends_one_late():
    _, _, mask = sampled()
    engine = np.where(np.arange(LONGEST) == 0, 0, noisy(1e-7))
    code, name = named(table(engine))
    assert (code, name) == (2, "shift")
    ends = np.arange(LONGEST) == mask.sum(1, keepdims=True) - 1
    assert named(table(np.where(ends, 0, noisy(1e-7)))) == (2, "shift")


def test_padding_that_is_counted():
    _, tokens, mask = sampled()
    columns = table(np.where(mask, noisy(1e-7), 0)) | {
        "mask": np.ones(mask.shape, np.int8),
        "tokens": np.where(mask, tokens, 0),
    }
    answer = found(columns)
    assert (answer.verdict.code, answer.causes[0].name) == (2, "padding")
    assert answer.causes[0].evidence["share of the tokens"] == pytest.approx(1 - mask.mean(), abs=0.02)
    assert f"{(~mask).sum():,} tokens" in answer.verdict.sentence


def test_weights_that_are_stale():
    age = np.arange(ROWS) % 4
    columns = table(noisy(0.03 * age[:, None] + 1e-7), version=20 - age)
    assert named(columns) == (2, "stale")
    fresh = table(noisy(1e-6), version=20 - age)
    assert named(fresh) == (1, "")


def test_a_sequence_weight_of_a_sum():
    _, _, mask = sampled()
    engine = noisy(0.02)
    total = ((table()["trainer_logprobs"] - engine) * mask).sum(1)
    assert named(table(engine, sequence_weights=np.exp(total)), "bfloat16") == (2, "sum for mean")
    assert named(table(engine, sequence_weights=np.exp(total / mask.sum(1))), "bfloat16") == (1, "")


def test_sequences_that_depend_on_their_micro_batch():
    micro = np.arange(ROWS) // 4
    first = (np.arange(ROWS) % 4 == 0)[:, None]
    assert named(table(noisy(np.where(first, 1e-7, 1.0)), micro_batch=micro)) == (2, "packing")
    assert named(table(noisy(1e-6), micro_batch=micro)) == (1, "")


def test_experts_that_differ():
    r = np.random.default_rng(3)
    flips = r.random((ROWS, LONGEST)) < 0.03
    own = np.stack([np.zeros((ROWS, LONGEST), int), np.ones((ROWS, LONGEST), int)], -1)
    other = own.copy()
    other[..., 1] += flips
    engine = noisy(np.where(flips, 1.0, 1e-7))
    answer = found(table(engine, trainer_experts=own, engine_experts=other[..., ::-1]))  # in any order
    assert (answer.verdict.code, answer.causes[0].name) == (2, "router flips")
    _, _, mask = sampled()
    assert answer.causes[0].tokens.startswith(f"{(flips & mask).sum():,} of")
    assert named(table(engine)) == (2, "router flips")


def test_a_gap_that_grows_along_the_response():
    assert named(table(noisy(0.002 * np.arange(LONGEST) + 1e-8))) == (2, "drift")


def test_another_context():
    other = sampled(7)[0]
    logits, tokens, _ = sampled()
    assert named(table(trainer=of(0.5 * logits + 0.5 * other, tokens))) == (2, "context")


def test_precision_alone():
    single = table()["engine_logprobs"].astype(np.float32)
    bits = (single.view(np.uint32) + 0x8000) & np.uint32(0xFFFF0000)
    answer = found(table(bits.view(np.float32), trainer=single))
    assert (answer.verdict.code, answer.causes[0].name) == (2, "precision")
    assert "rounded to bfloat16" in answer.verdict.sentence
    assert named(table(noisy(0.02))) == (2, "precision")
    assert named(table(noisy(0.02)), "bfloat16") == (1, "")


def test_a_repeated_scoring_is_the_floor():
    columns = table(noisy(0.02))
    repeated = noisy(0.02, seed=9)
    answer = found(columns | {"repeated_logprobs": repeated})
    assert answer.verdict.code == 1
    _, _, mask = sampled()
    assert answer.floor.allowed == pytest.approx(2 * np.abs(repeated - columns["trainer_logprobs"])[mask].mean())


def test_other_tokens_are_told_before_any_gap():
    columns = table(noisy(1.0))
    other = columns["tokens"].copy()
    other[3, 5] += 1
    answer = found(columns | {"trainer_tokens": other})
    assert answer.verdict.code == 2
    assert "not the same tokens: 1 token of 1 sequence" in answer.verdict.sentence
    assert "sequence 3 at place 5" in answer.verdict.sentence


def test_nan_inside_the_mask_is_never_rounding():
    columns = table(noisy(1e-7))
    columns["engine_logprobs"][2, 4] = np.nan
    answer = found(columns)
    assert (answer.verdict.code, "1 token inside the mask" in answer.verdict.sentence) == (2, True)
    assert "sequence 2 at place 4" in answer.verdict.details[0]
    assert found(columns | {"mask": np.zeros((ROWS, LONGEST))}).verdict.code == 3


def test_statistics_are_those_of_their_definitions():
    columns = table(noisy(0.3))
    _, _, mask = sampled()
    log_ratio = (columns["trainer_logprobs"] - columns["engine_logprobs"])[mask]
    ratio = np.exp(log_ratio)
    got = statistics_of(gathered(columns, "it"))
    assert got["k1"] == pytest.approx(-log_ratio.mean())
    assert got["k2"] == pytest.approx((log_ratio**2).mean() / 2)
    assert got["k3"] == pytest.approx((ratio - 1 - log_ratio).mean())
    assert got["effective sample size"] == pytest.approx(ratio.sum() ** 2 / (ratio**2).sum() / len(ratio))
    assert got["Pearson"] == pytest.approx(
        np.corrcoef(columns["trainer_logprobs"][mask], columns["engine_logprobs"][mask])[0, 1]
    )
    assert got["share clipped at 0.2"] == pytest.approx((np.abs(ratio - 1) > 0.2).mean())
    assert got["tokens"] == mask.sum()


def written(folder, columns):
    """Write the same columns in each format; return the files."""
    _, _, mask = sampled()
    lengths = mask.sum(1)
    ragged = {k: [v[i, : lengths[i]] for i in range(ROWS)] if v.ndim > 1 else v for k, v in columns.items()}
    save_file({k: np.ascontiguousarray(v) for k, v in columns.items()}, folder / "it.safetensors")
    np.savez_compressed(folder / "it.npz", **columns)
    with (folder / "it.jsonl").open("w") as file:
        for i in range(ROWS):
            file.write(json.dumps({k: v[i].tolist() for k, v in ragged.items()}) + "\n")
    lists = {k: pa.array([x.tolist() for x in v]) if isinstance(v, list) else pa.array(v) for k, v in ragged.items()}
    pq.write_table(pa.table(lists), folder / "it.parquet", row_group_size=5)
    flat = {k: np.concatenate(v) if isinstance(v, list) else np.repeat(v, lengths) for k, v in ragged.items()}
    flat["sequence"] = np.repeat(np.arange(ROWS), lengths)
    pq.write_table(pa.table({k: pa.array(v) for k, v in flat.items()}), folder / "flat.parquet")
    records = np.zeros(len(flat["tokens"]), [(k, v.dtype) for k, v in flat.items()])
    for name, values in flat.items():
        records[name] = values
    np.save(folder / "it.npy", records)
    with (folder / "flat.jsonl").open("w") as file:
        for i in range(len(records)):
            file.write(json.dumps({k: v[i].item() for k, v in flat.items()}) + "\n")
    return sorted(folder.iterdir())


def test_every_format_gives_the_same_answer(tmp_path):
    age = np.arange(ROWS) % 4
    columns = table(noisy(0.03 * age[:, None] + 1e-7), version=20 - age, micro_batch=np.arange(ROWS) // 4)
    answers = {path.name: judge(read_file(path), "float32", 4) for path in written(tmp_path, columns)}
    assert len(answers) == 7
    assert len({answer.verdict.sentence for answer in answers.values()}) == 1
    assert len({json.dumps(answer.statistics) for answer in answers.values()}) == 1


def test_tokens_of_prompt_and_response_are_taken_from_the_end():
    own = [np.array([-1.0, -2.0, -3.0])] * 2
    scored = gathered({"tokens": [np.array([9, 9, 1, 2, 3])] * 2, "trainer_logprobs": own, "engine_logprobs": own}, "it")
    assert scored.tokens.tolist() == [1, 2, 3, 1, 2, 3]
    assert not scored.masked


def test_the_command_has_exit_codes_json_and_a_page(tmp_path, capsys):
    logits, tokens, _ = sampled()
    texts = np.array([f"<{t}>" for t in range(VOCABULARY)])[tokens]
    columns = table(of(logits / 0.7, tokens))
    paths = {}
    for name, held in (("same", table()), ("noise", table(noisy(1e-6))), ("warm", columns)):
        paths[name] = tmp_path / f"{name}.safetensors"
        save_file({k: np.ascontiguousarray(v) for k, v in held.items()}, paths[name])
    given = ["--dtype", "float32", "--layers", "4"]
    codes = [main(["rollout-compare", str(path), *given]) for path in paths.values()]
    assert codes == [0, 1, 2]
    capsys.readouterr()
    with (tmp_path / "t.jsonl").open("w") as file:
        for i in range(ROWS):
            file.write(json.dumps({k: v[i].tolist() for k, v in (columns | {"token_texts": texts}).items()}) + "\n")
    files = ["--json", str(tmp_path / "it.json"), "--html", str(tmp_path / "it.html")]
    assert main(["rollout-compare", str(tmp_path / "t.jsonl"), *given, *files]) == 2
    assert capsys.readouterr().out.startswith("The temperature is not undone on one side")
    document = json.loads((tmp_path / "it.json").read_text())
    assert document["causes"][0]["name"] == "temperature"
    assert document["code"] == 2
    worst = document["worst tokens"][0]
    assert abs(worst["gap"]) == document["statistics"]["largest"]
    assert worst["text"] == f"<{worst['token']}>"
    page = (tmp_path / "it.html").read_text()
    assert "The temperature is not undone" in page
    assert page.count("<circle") > 500
    assert "Gap by position" in page


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FormatError, match=r"no log-probabilities of the engine: name a column 'engine_logprobs'"):
        gathered({"trainer_logprobs": np.zeros(3)}, "it")
    with pytest.raises(FormatError, match=r"mask has shape \[2\], which does not fit 3 tokens"):
        gathered({"trainer_logprobs": np.zeros(3), "engine_logprobs": np.zeros(3), "mask": np.zeros(2)}, "it")
    with pytest.raises(FormatError, match="lengths add up to 4"):
        gathered({"trainer_logprobs": np.zeros(3), "engine_logprobs": np.zeros(3), "lengths": np.array([2, 2])}, "it")
    with pytest.raises(UsageError, match=r"bfloat17.*did you mean 'bfloat16'"):
        judge(gathered(table(), "it"), "bfloat17")


class Runs:
    def __reduce__(self):
        return print, ("this ran",)


def hostile(folder):
    """Return files that lie, are cut off, need pickle or unpack to more than they should."""
    good = folder / "good.npz"
    np.savez_compressed(good, **table())
    (folder / "cut.npz").write_bytes(good.read_bytes()[:2000])
    np.savez(folder / "objects.npz", trainer_logprobs=np.array([Runs()], object), engine_logprobs=np.zeros(1))
    with zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as file:
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
        file.writestr("trainer_logprobs.npy", b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n")
    np.save(folder / "objects.npy", np.array([Runs()], object))
    np.save(folder / "plain.npy", np.zeros(4))
    (folder / "lies.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    (folder / "cut.safetensors").write_bytes(b"\x02")
    pq.write_table(pa.table({"trainer_logprobs": [1.0], "engine_logprobs": [1.0]}), folder / "good.parquet")
    (folder / "cut.parquet").write_bytes((folder / "good.parquet").read_bytes()[:-20])
    (folder / "words.jsonl").write_text('{"trainer_logprobs": ["a"], "engine_logprobs": [1]}\n')
    (folder / "deep.jsonl").write_text("[" * 100_000)
    (folder / "odd.jsonl").write_text('{"trainer_logprobs": [1], "engine_logprobs": [1]}\n{"trainer_logprobs": [1]}\n')
    (folder / "mixed.jsonl").write_text('{"trainer_logprobs": [1], "engine_logprobs": [1, 2]}\n')
    (folder / "nested.jsonl").write_text('{"trainer_logprobs": [[1], [2, 3]], "engine_logprobs": [1, 2]}\n')
    (folder / "objects.jsonl").write_text('{"trainer_logprobs": {"a": 1}, "engine_logprobs": {"a": 1}}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "pickled.pt").write_bytes(b"\x80\x02cos\nsystem\n")
    (folder / "what.txt").write_text("")
    good.unlink()
    (folder / "good.parquet").unlink()
    return sorted(folder.iterdir())


def test_hostile_files_are_refused_in_one_sentence_and_nothing_runs(tmp_path, capsys):
    for path in hostile(tmp_path):
        assert main(["rollout-compare", str(path)]) == 3, path.name
        said = capsys.readouterr()
        assert said.out == ""
        assert "this ran" not in said.err
        assert "fault of trainprobe" not in said.err, path.name
        assert path.name in said.err


def test_more_tokens_than_are_read_are_refused(tmp_path):
    many = np.broadcast_to(np.zeros(1, np.float32), (1 << 25,))
    with pytest.raises(FormatError, match="at most 16,777,216 are read: split the file"):
        gathered({"trainer_logprobs": many, "engine_logprobs": many}, "it")


def test_a_healthy_tail_of_one_repeated_token_is_not_padding():
    _, tokens, mask = sampled()
    columns = table(noisy(1e-6)) | {
        "tokens": np.where(np.arange(LONGEST) > 20, 7, tokens),
        "mask": np.ones(mask.shape, np.int8),
    }
    assert named(columns) == (1, "")
    assert math.isfinite(found(columns).floor.allowed)
