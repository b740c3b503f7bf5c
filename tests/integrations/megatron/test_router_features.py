"""Deeper features of a Megatron mixture of experts: its own TopKRouter, against NumPy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import launch

SCRIPT = Path(__file__).with_name("train_features.py")
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.fixture(scope="module")
def folder(require, tmp_path_factory) -> Path:
    require("megatron.core")
    folder = tmp_path_factory.mktemp("features")
    launch(SCRIPT, 1, str(folder))
    launch(SCRIPT, 1, str(folder), "bare")
    return folder


@pytest.fixture(scope="module")
def told(folder) -> dict:
    return json.loads((folder / "features.json").read_text())


def test_features_change_no_bit(folder):
    assert json.loads((folder / "bits.json").read_text()) == json.loads((folder / "bits.bare.json").read_text())


def test_load_and_entropy_of_each_call_are_those_of_the_router(told):
    seen: dict = {}
    for router in told["seen"]:
        seen.setdefault(router["name"], []).append(router)
    assert len(seen) == 2
    for name, calls in seen.items():
        for slot, key in (("router_load", "load"), ("router_entropy", "entropy")):
            found = [f["numbers"] for f in told["found"] if (f["name"], f["slot"]) == (name, slot)]
            wanted = [call[key] if key == "load" else [call[key]] for call in calls]
            assert found == [pytest.approx(numbers, rel=1e-5) for numbers in wanted]
            assert len(found) == 4  # two steps of two micro-batches


def test_similarity_is_that_of_the_weights_before_each_step(told):
    for name in {router["name"] for router in told["seen"]}:
        found = [f["numbers"][0] for f in told["found"] if (f["name"], f["slot"]) == (name, "router_similarity")]
        wanted = [router["similarity"] for router in told["seen"] if router["name"] == name][::2]
        assert found == pytest.approx(wanted, rel=1e-5)


def test_attention_weights_and_gradients_of_megatron_are_seen(told):
    slots = {f["slot"] for f in told["found"]}
    assert {"attention_entropy", "attention_logit", "attention_peak", "spectral_norm", "stable_rank"} <= slots
    heads = {len(f["numbers"]) for f in told["found"] if f["slot"] == "attention_entropy"}
    assert heads == {4}
    assert {f"underflow_fp8_e4m3.{slot}" for slot in ("output", "grad_output", "value", "grad")} <= slots
