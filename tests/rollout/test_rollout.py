"""Key data of a reinforcement-learning run: what is saved is what was handed over, and the comparison names the first place."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
import torch
from openpyxl import load_workbook

import trainprobe
from trainprobe import SingleComparator, SingleSave
from trainprobe.cli import main
from trainprobe.engine.arrays import torch_arrays
from trainprobe.errors import FormatError, OutputError, UsageError


@pytest.fixture(autouse=True)
def no_saver_is_left():
    yield
    SingleSave.close()


def saved(folder, key="x", step=0, micro=0, item=""):
    name = f"{key}.{item}.npy" if item else f"{key}.npy"
    return np.load(folder / f"data/{key}/step{step}/rank0/micro_step{micro}/{name}")


def statistics(folder, key="x", step=0, micro=0):
    return json.loads((folder / f"data/{key}/step{step}/rank0/micro_step{micro}/{key}.json").read_text())["data"]


def run(folder, steps=2, change=lambda step, micro, data: data):
    """Save prompts, responses, log-probabilities and losses of a small seeded run."""
    generator = torch.Generator().manual_seed(0)
    SingleSave(folder)
    for step in range(steps):
        for micro in range(2):
            tokens = torch.randint(0, 1 << 30, (2, 5), generator=generator)
            data = {
                "prompt": ["what is 2 + 2?", "name a colour"],
                "response": [tokens[0].tolist(), tokens[1, :3].tolist()],
                "log_prob": -torch.rand(2, 5, generator=generator, dtype=torch.float32),
                "loss": torch.rand((), generator=generator),
            }
            SingleSave.save(change(step, micro, data))
        SingleSave.step()
    SingleSave.close()
    return folder


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_every_dtype_comes_back_to_the_last_bit(tmp_path, dtype):
    value = (torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) * 100 - 20).to(dtype)
    SingleSave(tmp_path / "a")
    SingleSave.save({"x": value})
    SingleSave.close()
    array = saved(tmp_path / "a")
    exact = value.to(torch.float32).numpy() if dtype in (torch.bfloat16, torch.float8_e4m3fn) else value.numpy()
    assert array.dtype == exact.dtype
    assert array.tobytes() == exact.tobytes()
    assert statistics(tmp_path / "a")["dtype"] == str(dtype).removeprefix("torch.")


def test_a_tensor_on_a_device_is_copied_there_and_brought_over_by_the_writer(tmp_path, monkeypatch):
    threads = []

    class Watched(torch_arrays.LateCopy):
        @property
        def data(self):
            threads.append(threading.current_thread().name)
            return super().data

    monkeypatch.setattr(torch_arrays, "copy_late", Watched)
    kept = {str(d).removeprefix("torch."): (torch.rand(3, 4) * 100 - 20).to(d).t() for d in DTYPES}
    kept |= {"complex": torch.randn(4, dtype=torch.complex64).conj(), "scalar": torch.tensor(0.5)}
    exact = {name: t.clone() for name, t in kept.items()}
    SingleSave(tmp_path / "a")
    SingleSave.save(kept)
    for t in kept.values():
        t.zero_()
    SingleSave.close()
    assert len(threads) == len(kept) and all(name.startswith("trainprobe-rollout") for name in threads)
    for name, t in exact.items():
        wanted = t.float() if t.dtype == torch.bfloat16 else t
        assert np.array_equal(saved(tmp_path / "a", name), wanted.resolve_conj().numpy()), name


def test_large_token_ids_are_not_rounded(tmp_path):
    SingleSave(tmp_path / "a")
    SingleSave.save({"x": torch.tensor([2**24 + 1, 2**53 + 1])})
    SingleSave.close()
    assert saved(tmp_path / "a").tolist() == [2**24 + 1, 2**53 + 1]


def test_a_value_is_saved_as_it_was_even_if_the_training_writes_over_it(tmp_path):
    value = torch.zeros(1000)
    SingleSave(tmp_path / "a")
    for _ in range(20):
        SingleSave.save({"x": value})
        value.add_(1)
    SingleSave.close()
    assert [float(saved(tmp_path / "a", micro=i).mean()) for i in range(20)] == list(range(20))
    assert value.requires_grad is False


def test_statistics_are_those_of_float64(tmp_path):
    value = torch.randn(1000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    SingleSave(tmp_path / "a")
    SingleSave.save({"x": value})
    SingleSave.close()
    exact = value.double().numpy()
    told = statistics(tmp_path / "a")
    assert told["max"] == exact.max() and told["min"] == exact.min()
    assert math.isclose(told["mean"], exact.mean(), rel_tol=1e-12)
    assert math.isclose(told["norm"], float(np.sqrt((exact**2).sum())), rel_tol=1e-12)
    assert told["shape"] == [1000]


def test_any_nesting_texts_and_ragged_lists(tmp_path):
    SingleSave(tmp_path / "a")
    value = {"texts": ["ä", "", "long text"], "ragged": [[1, 2, 3], [4]], "pair": (torch.ones(2), None), "number": 0.5}
    SingleSave.save({"x": value})
    SingleSave.close()
    folder = tmp_path / "a"
    assert saved(folder, item="texts").tolist() == ["ä", "", "long text"]
    assert [saved(folder, item=f"ragged.{i}").tolist() for i in (0, 1)] == [[1, 2, 3], [4]]
    assert saved(folder, item="pair.0").tolist() == [1.0, 1.0]
    assert float(saved(folder, item="number")) == 0.5
    assert statistics(folder)["pair"][1] is None


def test_micro_batches_steps_and_the_configuration_have_their_places(tmp_path):
    run(tmp_path / "a")
    SingleSave(tmp_path / "b")
    SingleSave.save_ex({"x": 1.0})
    SingleSave.save_ex({"x": 2.0}, micro_batch=7)
    SingleSave.save_config({"rollout": {"n": 4}})
    SingleSave.close()
    folders = sorted(p.relative_to(tmp_path / "a").as_posix() for p in (tmp_path / "a").glob("data/loss/*/*/*"))
    assert folders == [f"data/loss/step{s}/rank0/micro_step{m}" for s in (0, 1) for m in (0, 1)]
    assert float(np.load(tmp_path / "b/data/x/step0/rank0/x.npy")) == 1.0
    assert float(saved(tmp_path / "b", micro=7)) == 2.0
    assert json.loads((tmp_path / "b/configurations.json").read_text()) == {"rollout": {"n": 4}}


def test_what_cannot_be_saved_is_named_once_and_the_rest_is_saved(tmp_path, capsys):
    SingleSave(tmp_path / "a")
    for _ in range(3):
        SingleSave.save({"x": [torch.ones(1), object()], "../evil": torch.ones(1), "y": np.array([object()])})
        SingleSave.save("not a dict")
    SingleSave.close()
    told = capsys.readouterr().err
    assert told.count("x.1") == told.count("'../evil' cannot be a file name") == told.count("leaves out y") == 1
    assert saved(tmp_path / "a", item="0").tolist() == [1.0]
    assert not list(tmp_path.rglob("evil*"))


def test_a_second_run_never_mixes_with_the_first(tmp_path):
    run(tmp_path / "a", steps=1)
    with pytest.raises(OutputError, match="holds key data of rank 0"):
        SingleSave(tmp_path / "a")
    SingleSave(tmp_path / "b")
    assert SingleSave(tmp_path / "b") is SingleSave(tmp_path / "b")
    with pytest.raises(UsageError, match="already"):
        SingleSave(tmp_path / "c")
    SingleSave.close()
    with pytest.raises(UsageError, match="make one first"):
        SingleSave.save({})
    with pytest.raises(UsageError, match="did you mean 'pytorch'"):
        SingleSave(tmp_path / "d", fmk="torch")


def test_equal_runs_are_the_same(tmp_path, capsys):
    a, b = run(tmp_path / "a"), run(tmp_path / "b")
    assert main(["rollout-compare", str(a), str(b), "-o", str(tmp_path / "out")]) == 0
    assert "The key data are the same: 20 arrays of 4 keys, 20 equal in every element." in capsys.readouterr().out
    assert trainprobe.SingleSave is SingleSave


def test_the_first_difference_is_named_in_the_order_of_saving(tmp_path, capsys):
    def other_response(step, micro, data):
        if step == 1 and micro == 1:
            data["response"][1][2] += 1
            data["log_prob"][1, 2] *= 1.5
        return data

    a, b = run(tmp_path / "a"), run(tmp_path / "b", change=other_response)
    assert main(["rollout-compare", str(a), str(b), "-o", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().out
    assert "response.1 (step 1, rank 0, micro-batch 1) differs first: element 2 of [3] is " in told
    assert "In that step prompt is the same. 2 of 20 arrays of 4 keys differ." in told
    verdict = json.loads((tmp_path / "out/verdict.json").read_text())
    assert [(row["key"], row["item"], row["verdict"]) for row in verdict["not the same"]] == [
        ("response", "1", "differ"),
        ("log_prob", "", "differ"),
    ]


def test_the_figures_of_a_sheet_against_numpy(tmp_path):
    generator = np.random.default_rng(3)
    x = generator.standard_normal((40, 50)).astype(np.float32)
    y = x * (1 + generator.choice([0, 5e-4, 5e-3, 0.5], x.shape)).astype(np.float32)
    for name, value in (("a", x), ("b", y)):
        SingleSave(tmp_path / name)
        SingleSave.save({"k": value})
        SingleSave.close()
    SingleComparator.compare(tmp_path / "a", tmp_path / "b", tmp_path / "out")
    sheet = load_workbook(tmp_path / "out/k.xlsx").active
    head, row = [[cell.value for cell in line] for line in sheet.iter_rows()]
    assert head[:12] == [
        *("step", "rank", "micro_step", "id", "shape1", "shape2", "相同元素百分比(%)", "首个不匹配元素索引"),
        *("最大绝对误差", "最大相对误差", "误差在千分之一内元素占比(%)", "误差在百分之一内元素占比(%)"),
    ]
    u, v = x.astype(float), y.astype(float)
    relative = abs(u - v) / np.maximum(abs(u), abs(v))
    expected = [
        *(100 * (u == v).mean(), int((u != v).ravel().argmax()), abs(u - v).max(), relative.max()),
        *(100 * (relative <= 1e-3).mean(), 100 * (relative <= 1e-2).mean()),
    ]
    assert row[:6] == [0, 0, 0, 0, "[40, 50]", "[40, 50]"]
    assert row[6:12] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("x", "y", "verdict"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), "same"),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), "differ"),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), "differ"),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-20]), "rounding"),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-18]), "differ"),
        (torch.tensor([0.0]), torch.tensor([1e-30]), "differ"),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0 + 2**-8]), "rounding"),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.5]), "differ"),
        (torch.tensor([7]), torch.tensor([8]), "differ"),
        (torch.tensor([200], dtype=torch.uint8), torch.tensor([201], dtype=torch.uint8), "differ"),
        (torch.ones(2, 3), torch.ones(3, 2), "shape"),
        (torch.ones(2, 3), torch.ones(6), "shape"),
        (torch.ones(0), torch.ones(0), "same"),
        (["a"], ["b"], "differ"),
        (["a"], torch.ones(1), "differ"),
    ],
)
def test_verdicts_of_odd_pairs(tmp_path, x, y, verdict):
    for name, value in (("a", x), ("b", y)):
        SingleSave(tmp_path / name)
        SingleSave.save({"k": value})
        SingleSave.close()
    found = SingleComparator.compare(tmp_path / "a", tmp_path / "b", tmp_path / "out")
    assert [row.verdict for row in found.rows] == [verdict]
    assert (tmp_path / "out/k.xlsx").exists()


def test_missing_data_are_a_difference_and_not_a_pass(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", steps=1)
    found = SingleComparator.compare(a, b, tmp_path / "out")
    assert found.code == 2
    assert found.first is not None and found.first.verdict == "missing" and found.first.address.step == 1
    assert "only" in found.sentence


def test_the_noise_of_a_repeated_run_is_the_floor(tmp_path):
    def noisy(size):
        return lambda step, micro, data: {**data, "log_prob": data["log_prob"] + size}

    a, repeated = run(tmp_path / "a"), run(tmp_path / "c", change=noisy(1e-4))
    near, far = run(tmp_path / "near", change=noisy(1.5e-4)), run(tmp_path / "far", change=noisy(1e-3))
    assert SingleComparator.compare(a, near, tmp_path / "out", floor=repeated).code == 1
    found = SingleComparator.compare(a, far, tmp_path / "out", floor=repeated)
    assert found.code == 2 and found.first is not None and found.first.address.key == "log_prob"


def test_broken_and_hostile_folders_are_told(tmp_path):
    a, b = run(tmp_path / "a", steps=1), run(tmp_path / "b", steps=1)
    with pytest.raises(FormatError, match="holds no key data"):
        SingleComparator.compare(tmp_path, a, tmp_path / "out")
    broken = next(b.glob("data/loss/**/*.npy"))
    np.save(broken, np.array([{}], dtype=object), allow_pickle=True)
    found = SingleComparator.compare(a, b, tmp_path / "out")
    assert found.code == 3
    assert [row.address.key for row in found.rows if row.verdict == "unreadable"] == ["loss"]
