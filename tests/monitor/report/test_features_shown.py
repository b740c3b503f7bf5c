"""Deeper features on the page: one map a feature, rows named by head and expert, and a page that a browser opens quietly."""

import numpy as np
import pytest
import torch
from chromium import Browser, require_chromium

import trainprobe
from trainprobe.cli import main
from trainprobe.demo.gpt import GPT, Shape, next_token_loss
from trainprobe.monitor.report.from_run import collect_histories, view_of
from trainprobe.monitor.run_folder import read_frames

FEATURES = {"attention": True, "weights": True, "formats": {"formats": "fp8_e5m2"}, "dead_units": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=32, heads=4, context=16, vocabulary=40))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    plan = {"level": "off", "sinks": ["parquet"], "monitor": {"features": FEATURES, "batches": True}}
    with trainprobe.watch(model, optimizer, plan, output=folder) as probe:
        for step in range(6):
            tokens = torch.randint(0, 40, (3, 17))
            with probe.step(step):
                optimizer.zero_grad()
                loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
                loss.backward()
                optimizer.step()
                probe.note("loss", loss.detach())
    return folder


def test_each_feature_is_a_map_of_its_own_in_words(folder):
    histories = {}
    frames = list(collect_histories(read_frames(folder), histories))
    metrics = {metric.name: metric for metric in view_of("run", histories, {}).metrics if metric.statistic == "value"}
    kinds = ("outputs", "gradients of outputs", "parameters", "gradients")
    assert set(metrics) == {
        *("attention entropy", "attention, largest logit", "attention, peak", "spectral norm", "stable rank"),
        "dead units, outputs",
        *(f"{lost} fp8_e5m2, {kind}" for lost in ("underflow", "overflow") for kind in kinds),
    }
    assert list(metrics["attention entropy"].rows) == [f"layers.{i}.attn head {h}" for i in range(2) for h in range(4)]
    assert "layers.0.mlp.up.weight" in metrics["underflow fp8_e5m2, gradients"].rows
    assert list(metrics["dead units, outputs"].rows) == ["layers.0.mlp.act", "layers.1.mlp.act"]
    shown = metrics["spectral norm"]
    norm = next(
        t for t in histories[0].series if t.address.slot == "spectral_norm" and t.address.name == "layers.1.attn.qkv.weight"
    )
    assert np.array_equal(shown.values[0, shown.rows.index(norm.address.name)], histories[0].get(norm)[1].astype(np.float32))
    assert len(frames) == 6


def test_a_browser_opens_the_page_and_shows_every_map(folder):
    page = folder / "report.html"
    assert main(["report", str(folder), "-o", str(page)]) == 0
    browser = Browser(require_chromium())
    try:
        browser.open(page)
        names = browser.run("[...new Set([...document.getElementById('pick-metric').options].map(o => o.value))]")
        assert "attention entropy" in names and "underflow fp8_e5m2, gradients" in names
        for name in names:
            browser.run(
                f"(() => {{ const s = document.getElementById('pick-metric'); s.value = {name!r};"
                "s.dispatchEvent(new Event('change')); })()"
            )
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    finally:
        browser.close()
