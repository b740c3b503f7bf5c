"""The page of two dumps, and of one, in a real browser: what stands on it, and that hand and key can use it."""

import gc
import re
import time

import numpy as np
import orjson
import pytest

from tests.dump_compare.small_runs import run
from tests.monitor.report.chromium import Browser, require_chromium
from trainprobe.cli import main
from trainprobe.dump_compare.command import compare_rank
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.page.histograms import BINS, histogram
from trainprobe.dump_compare.page.write import ShownPair, pack_rank, write_page
from trainprobe.dump_compare.pairing import CallPair, RankPair
from trainprobe.engine.core.records import Call
from trainprobe.engine.storage.dumps import read

SELECTED = "document.querySelector('.row.selected:not([hidden]) .label')?.textContent"
LABELS = "[...document.querySelectorAll('.row:not([hidden]) .cell.a .label')].map(x => x.textContent)"
PANEL = "document.getElementById('panel').innerText"
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser():
    opened = Browser(require_chromium(), 1400, 900)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    plan = {"level": "mix", "task": "tensor"}
    return run(folder / "a", "", **plan), run(folder / "b", "gelu", **plan)


@pytest.fixture(scope="module")
def page(browser, dumps, tmp_path_factory):
    target = tmp_path_factory.mktemp("page") / "page.html"
    assert main(["dump-compare", *map(str, dumps), "--html", str(target), "-q"]) == 2
    browser.open(target)
    return browser


def press(page, *keys):
    for key in keys:
        page.run(f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))")
    page.run("new Promise(done => setTimeout(done, 150))")


def until(page, script, wanted):
    """Wait until a script answers what is wanted; data of a rank or a call are unpacked when they are first needed."""
    for _ in range(200):
        if page.run(script) == wanted:
            return
        time.sleep(0.05)
    raise AssertionError(f"{script} is {page.run(script)!r} and not {wanted!r}")


def leaf(**also):
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2],
        "Max": 1.0,
        "Min": 0.0,
        "Mean": 0.5,
        "Norm": 1.0,
        **also,
    }


def write_dump(folder, rank, entries, parents=None):
    at = folder / "step0" / f"rank{rank}"
    at.mkdir(parents=True)
    (at / "dump.json").write_bytes(orjson.dumps({"framework": "pytorch", "level": "mix", "data": entries}))
    (at / "construct.json").write_bytes(orjson.dumps(parents or {}))
    return folder


def test_the_page_opens_at_the_place_where_the_runs_part_and_asks_nothing_of_the_network(page):
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("file:")] == []
    assert page.run(SELECTED) == "gelu"
    assert page.run("document.getElementById('sentence').textContent").startswith("The first difference is at")


def test_the_tree_is_folded_but_for_what_leads_there(page):
    labels = page.run(LABELS)
    assert labels[:1] == ["forward"]
    inside = labels[labels.index("layers.1") + 1 : labels.index("layers.2")]
    assert inside[-3:] == ["gelu", "down", "add"], "of the modules within layers.1 only `act` is unfolded"
    assert labels[labels.index("layers.0") + 1] == "layers.1", "what agrees is folded"


def test_the_numbers_of_both_sides_are_those_of_the_dumps(page, dumps):
    until(page, "document.querySelectorAll('.histogram').length", 1)
    text = page.run(PANEL)
    for folder in dumps:
        data = read(folder / "step0" / "rank0")
        out = next(call.out for call in data.calls if (call.name, call.call, call.phase) == ("Functional.gelu", 1, "forward"))
        row = (out[0] if isinstance(out, list) else out).row
        for name in ("max", "min", "norm"):
            assert f"{float(f'{data.finished[name][row]:.9g}'):.9g}" in text
    assert "approximate is 'none' in A and 'tanh' in B" in text
    assert "GELU.forward" in text, "the call stack"


def test_stored_values_have_a_histogram_of_both_sides(page):
    assert page.run("[...document.querySelectorAll('.histogram')].map(x => x.querySelectorAll('path').length)") == [2]


def test_keys_go_to_differences_and_back_to_the_first(page):
    press(page, "f", "n")
    second = page.run(SELECTED)
    assert page.run("document.querySelector('.row.selected').className").count("v-") == 1
    press(page, "p")
    assert page.run(SELECTED) == "gelu"
    press(page, "n", "n")
    assert page.run(SELECTED) != second or page.run("document.getElementById('said').textContent")
    press(page, "f")
    assert page.run(SELECTED) == "gelu"
    press(page, "ArrowLeft")
    assert page.run(SELECTED) == "act"
    press(page, "ArrowLeft")
    labels = page.run(LABELS)
    assert labels[labels.index("act") + 1] == "down"
    press(page, "ArrowRight", "ArrowRight")
    assert page.run(SELECTED) == "gelu"


def test_search_counts_and_visits_what_it_finds(page):
    page.run("(s => { s.value = 'layer_norm'; s.dispatchEvent(new Event('input')) })(document.getElementById('search'))")
    count = int(re.fullmatch(r".* of (\d+)", page.run("document.getElementById('hits').textContent"))[1])
    assert count >= 3
    page.run("document.getElementById('search').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))")
    assert page.run(SELECTED) == "layer_norm"
    assert page.run("document.querySelector('mark').textContent") == "layer_norm"
    page.run("document.getElementById('search').dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")


def test_another_step_is_chosen(page):
    page.run("(s => { s.value = '1'; s.dispatchEvent(new Event('change')) })(document.getElementById('pick-step'))")
    until(page, "document.documentElement.dataset.shown", "1")
    press(page, "ArrowDown")
    assert page.run(SELECTED) == "forward"
    press(page, "f")
    until(page, SELECTED, "gelu")
    assert page.run("document.getElementById('pick-step').value") == "0"


def test_a_collective_leads_to_the_other_rank(browser, tmp_path):
    group = {"group": {"type": "torch.distributed.ProcessGroup", "group_ranks": [0, 1]}}
    collective = {"input_args": [leaf()], "input_kwargs": group, "output": [leaf()]}
    for side in "ab":
        other = leaf(Max=3.0, Norm=3.0) if side == "b" else leaf()
        for rank in (0, 1):
            before = {"Functional.relu.0.forward": {"input_args": [leaf()], "output": [other if rank else leaf()]}}
            alone = {
                "Distributed.broadcast.0.forward": {
                    **collective,
                    "input_kwargs": {"group": {**group["group"], "group_ranks": [0]}},
                }
            }
            entries = {**before, **({} if rank else alone), "Distributed.all_reduce.0.forward": collective}
            write_dump(tmp_path / side, rank, entries)
    target = tmp_path / "page.html"
    assert main(["dump-compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(target), "-q"]) == 2
    browser.open(target)
    assert browser.run("document.getElementById('pick-rank').selectedOptions[0].textContent") == "1 ●"
    press(browser, "End")
    assert browser.run(SELECTED) == "all_reduce"
    press(browser, "g")
    until(browser, "document.documentElement.dataset.shown", "0")
    until(browser, SELECTED, "all_reduce")
    assert browser.run("document.getElementById('pick-rank').selectedOptions[0].textContent") == "0"


def test_names_of_a_hostile_dump_are_text_and_circles_end(browser, tmp_path):
    browser.errors.clear()
    name = f"Functional.{HOSTILE}.0.forward"
    entries = {name: {"input_args": [leaf(), HOSTILE], "output": [leaf(dtype=HOSTILE, data_name="../../secret")]}}
    entries |= {f"Functional.x.{i}.forward": {"input_args": [leaf()], "output": [leaf()]} for i in (1, 2, 3)}
    circle = {f"Functional.x.{i}.forward": f"Functional.x.{i % 3 + 1}.forward" for i in (1, 2, 3)}
    dump = write_dump(tmp_path / "a", 0, entries, circle)
    target = tmp_path / "page.html"
    entries[name]["output"][0].pop("data_name")
    write_dump(tmp_path / "b", 0, entries, circle)
    assert main(["show", str(tmp_path / "b"), "-o", str(target)]) == 0
    browser.open(target)
    press(browser, "x", "Home", "ArrowDown")
    assert browser.run("document.title") != "taken"
    assert browser.errors == []
    until(browser, f"{PANEL}.includes({HOSTILE!r})", True)
    assert len(browser.run(LABELS)) == 5
    assert main(["show", str(dump), "-o", str(target)]) == 3, "a tensor's name that leads out of the folder"


def test_one_dump_alone_shows_what_is_not_finite(browser, tmp_path):
    entries = {f"Functional.x.{i}.forward": {"input_args": [leaf()], "output": [leaf()]} for i in range(3)}
    entries["Functional.x.1.forward"]["output"] = [leaf(Max=float("nan"))]
    at = write_dump(tmp_path / "a", 0, {})
    (at / "step0/rank0/dump.json").write_text(str({"data": entries}).replace("'", '"').replace("nan", "NaN"))
    assert main(["show", str(at)]) == 0
    browser.open(at / "dump.html")
    assert browser.run("document.getElementById('sentence').textContent") == (
        "3 calls in 1 step of 1 rank, 1 of them hold NaN or infinities"
    )
    press(browser, "n")
    assert browser.run("document.querySelector('.row.selected .aside').textContent") == "Functional ·1"
    until(browser, f"{PANEL}.includes('nan')", True)


def test_deep_names_fit_a_phone(browser, tmp_path):
    """The names of a dump without what is between them, what is on one side only, and twelve modules in one another."""
    deep = [f"Module.{'.'.join(f'part{k}' for k in range(i + 1))}.Block.forward.0" for i in range(12)]
    long = [
        f"Module.model.decoder.layers.{i}.self_attention.linear_query_key_value.base_layer.Linear.forward.0" for i in (0, 1)
    ]
    entries = {name: {"input_args": [leaf()], "output": [leaf()]} for name in [*deep, *long]}
    parents = dict(zip(deep[1:], deep, strict=False))
    a = write_dump(tmp_path / "a", 0, entries, parents)
    b = write_dump(tmp_path / "b", 0, {name: entry for name, entry in entries.items() if name != long[1]}, parents)
    target = tmp_path / "page.html"
    main(["dump-compare", str(a), str(b), "--html", str(target), "-q"])
    browser.resize(390, 844)
    try:
        browser.open(target)
        press(browser, "Home", "x")
        parts = ", ".join(f".row:not([hidden]) {part}" for part in (".label", ".far .number"))
        cut = f"[...document.querySelectorAll('{parts}')].filter((x) => x.checkVisibility()"
        cut += " && (x.scrollWidth > x.clientWidth + 1 || x.scrollHeight > x.clientHeight + 1"
        cut += " || x.getBoundingClientRect().bottom > x.closest('.row').getBoundingClientRect().bottom)"
        cut += ").map((x) => x.textContent)"
        assert browser.run(cut) == []
        assert {"part0", "part5"} <= {*browser.run(LABELS)}
        press(browser, "End")
        assert browser.run(cut) == []
        assert long[0].removeprefix("Module.").removesuffix(".Linear.forward.0") in browser.run(LABELS)
        told = "[...document.querySelectorAll('.row:not([hidden]) .told')].map(x => x.parentNode.textContent)"
        assert browser.run(told) == [f"{long[1][7:-17]} only in A"]
        assert browser.run("document.documentElement.scrollWidth") == 390
    finally:
        browser.resize(1400, 900)


def test_micro_batches_are_chosen(browser, tmp_path):
    entries = {f"Functional.x.{i}.forward": {"input_args": [leaf()], "output": [leaf()]} for i in range(4)}
    parents = {name: [None, i % 2] for i, name in enumerate(entries)}
    at = write_dump(tmp_path / "a", 0, entries, parents)
    main(["show", str(at)])
    browser.open(at / "dump.html")
    assert len(browser.run(LABELS)) == 6
    page = "(s => { s.value = '1'; s.dispatchEvent(new Event('change')) })(document.getElementById('pick-micro'))"
    browser.run(page)
    assert len(browser.run(LABELS)) == 3


def test_fifty_thousand_calls_open_and_scroll(browser, tmp_path):
    """The calls are made here, and not read from a file of 50 MB; the numbers are those of a small dump."""
    side = Side(
        write_dump(tmp_path / "a", 0, {"Functional.x.0.forward": {"input_args": [leaf()], "output": [leaf()]}}) / "step0/rank0"
    )
    (model,) = side.step_data.calls
    calls = [model]
    for i in range(1, 50_000):
        call = Call("op", "Functional.linear", i, "forward", parent=model if i % 10 == 1 else calls[-(i % 10) or -10])
        call.out = model.out
        calls.append(call)
    judged = [Judged(CallPair(i, call, None)) for i, call in enumerate(calls)]
    target = write_page(
        ShownPair("large", "large", [], 0, ["a"]), [pack_rank(0, 0, judged, (side, None))], tmp_path / "page.html"
    )
    seconds = browser.open(target)
    press(browser, "x")
    assert browser.run("document.getElementById('height').offsetHeight") == 50_001 * 24
    browser.run("(v => { v.scrollTop = 600000 })(document.getElementById('view'))")
    press(browser, "Shift")
    assert browser.run("document.querySelectorAll('.row').length") < 100, "only the lines that are to be seen are drawn"
    assert set(browser.run(LABELS)) == {"linear"}
    assert seconds < 10, "0.6 s on a quiet machine"


def test_histograms_count_all_finite_elements_over_common_bins():
    a, b = np.array([0.0, 1.0, np.nan, 2.0]), np.array([2.0, 4.0, np.inf])
    low, high, counts = histogram((a, b))
    assert (low, high) == (0.0, 4.0)
    assert [sum(each) for each in counts] == [3, 2]
    assert counts[0] == np.histogram(a[[0, 1, 3]], BINS, (0, 4))[0].tolist()
    assert histogram((np.array([np.nan]), None)) is None


def test_a_rank_is_judged_without_the_garbage_collector_which_is_as_it_was_afterwards(tmp_path):
    """Half of the time of a comparison of 100,000 calls went to it."""
    at = write_dump(tmp_path / "a", 0, {"Functional.x.0.forward": {"input_args": [leaf()], "output": [leaf()]}}) / "step0/rank0"
    found = compare_rank(RankPair(0, 0, at, at), make={"collects": lambda *_: gc.isenabled()})
    assert found.made == {"collects": False}
    assert gc.isenabled()
