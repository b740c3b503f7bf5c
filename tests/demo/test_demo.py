"""The demo is the main job: it trains, dumps two steps, and leaves a page that needs no network."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from trainprobe.demo.corpus import draw_batch, read_corpus
from trainprobe.demo.gpt import GPT, Shape, explicit_attention, next_token_loss, rotate


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run the command for a few steps; return its output text and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "trainprobe", "demo", "--output", str(folder), "--steps", "6", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "run1"


def test_two_steps_are_dumped_in_full(demo):
    _, folder = demo
    assert {path.parent.parent.name for path in folder.glob("step*/rank0/dump.json")} == {"step0", "step5"}
    data = json.loads((folder / "step5/rank0/dump.json").read_text())["data"]
    assert {"Module.layers.5.mlp.FeedForward.forward.0", "Functional.cross_entropy.0.forward"} <= set(data)


def test_the_page_names_no_address_to_fetch_from(demo):
    page = (demo[1] / "report.html").read_text()
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)|https?://(?!www\.w3\.org)|@import|fetch\(""", page) == []


def test_every_path_that_is_printed_exists(demo):
    text, folder = demo
    paths = re.findall(rf"{re.escape(str(folder))}\S*", text)
    assert len(paths) == 4
    assert all(folder.joinpath(path).exists() for path in paths)


def test_the_loss_falls(demo):
    first, last = map(float, re.search(r"([\d.]+) → ([\d.]+) nats", demo[0]).groups())
    assert last < first


def test_a_second_run_takes_a_new_folder(demo):
    from trainprobe.demo.command import new_folder

    assert new_folder(demo[1].parent).name == "run2"


def test_the_corpus_is_the_same_each_time():
    assert np.array_equal(read_corpus(300_000), read_corpus(300_000))


def test_targets_are_the_inputs_moved_by_one():
    inputs, targets = draw_batch(read_corpus(300_000), step=3, batch=2, length=16)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_the_demo_model_has_about_five_million_parameters():
    assert sum(p.numel() for p in GPT().parameters()) == pytest.approx(5e6, rel=0.05)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_token_sees_only_what_is_before_it(positions):
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=16, heads=2, context=8, vocabulary=11, positions=positions)).eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 11
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])


def test_explicit_attention_equals_the_fused_one():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 6, dtype=torch.float64)
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(explicit_attention(q, k, v, is_causal=True, dropout_p=0.0), fused, rtol=1e-12)


def test_rotary_scores_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(1, 6).expand(7, 6), torch.randn(1, 6).expand(7, 6)
    scores = rotate(q[None, None]) @ rotate(k[None, None]).transpose(-2, -1)
    assert torch.allclose(scores[0, 0].diagonal(2), scores[0, 0].diagonal(2)[0].expand(5), atol=1e-5)


def test_an_untrained_model_knows_nothing():
    torch.manual_seed(0)
    inputs, targets = map(torch.from_numpy, draw_batch(read_corpus(300_000), 0, 2, 64))
    assert float(next_token_loss(GPT()(inputs), targets).detach()) == pytest.approx(np.log(256), rel=0.05)


def test_every_curve_is_there_once(demo):
    from trainprobe.engine.storage.dumps.log import read_log
    from trainprobe.monitor.scalar_names import role_of

    names = list(list(read_log(demo[1] / "rank0"))[-1].scalars)
    assert sorted(names) == ["grad_norm", "loss", "lr", "tokens"]
    roles = [role_of(name) for name in names if role_of(name)]
    assert len(roles) == len(set(roles)) == 3
