"""The page in a real browser: it opens, it is quiet, it shows, and it can be used by hand and by key."""

import re
import time

import numpy as np
import pytest
from chromium import Browser, require_chromium
from measure_open import large_run

from trainprobe.engine.core.records import Finding, Place, Site
from trainprobe.errors import OutputError, UsageError
from trainprobe.monitor.report import Metric, RunView, Table, write_page
from trainprobe.monitor.report.page import render_page, thin


def a_run(rows=12, steps=300, ranks=2):
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(0, 0.3, (ranks, rows, steps))) * np.linspace(0.1, 2, rows)[None, :, None]
    values[0, 4:, 250:] = np.nan
    missing = np.zeros(values.shape, bool)
    missing[:, 2, 100:150] = True
    numbers = np.arange(steps)
    names = [f"layers.{i}.weight" for i in range(rows)]
    first = Finding("nonfinite", "error", "the first NaN", 250, Place(0, ranks), Site("parameter", names[4], "grad"))
    return RunView(
        title="a <run> & more",
        meta={"ranks": str(ranks)},
        scalars={"loss": (numbers, np.linspace(4, 1, steps)), "lr": (numbers, np.full(steps, 1e-3))},
        metrics=[
            Metric("gradients", names, numbers, values, "norm", missing),
            Metric("means", names, numbers, values - 1, "mean"),
        ],
        findings=[Finding("spike", "warning", "a spike", 290, Place(1, ranks), Site("parameter", names[7], "grad")), first],
        tables=[Table("Rules", ["rule"], [["spike </script><!--<script>"]])],
    )


@pytest.fixture(scope="module")
def browser():
    opened = Browser(require_chromium())
    yield opened
    opened.close()


@pytest.fixture
def page(browser, tmp_path):
    browser.errors.clear()
    browser.requests.clear()
    browser.open(write_page(a_run(), tmp_path / "report.html"))
    return browser


SHADES = """(() => { const c = document.getElementById('heat'), x = c.width * 0.35 | 0;
  const d = c.getContext('2d').getImageData(x, 0, c.width - x, c.height - 30).data;
  return new Set(new Uint32Array(d.buffer)).size })()"""
SHOWN = "document.getElementById('brush').getAttribute('aria-valuetext')"
BOX = "(({x, y, width, height}) => [x, y, width, height])(document.getElementById('{}').getBoundingClientRect())"


def box(page, name):
    page.run(f"document.getElementById('{name}').scrollIntoView({{block: 'center'}})")
    return page.run(BOX.replace("{}", name))


def steps_shown(page):
    return [int(n.replace("\u2009", "")) for n in re.findall(r"[\d\u2009]+", page.run(SHOWN))]


def test_the_page_opens_without_an_error_and_asks_nothing_of_the_network(page):
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


def test_the_heatmap_is_not_blank(page):
    assert page.run(SHADES) > 20


def test_dragging_over_the_map_zooms_to_those_steps(page):
    x, y, width, _ = box(page, "heat")
    assert steps_shown(page) == [0, 299]
    page.drag(x + width * 0.5, x + width * 0.75, y + 50)
    low, high = steps_shown(page)
    assert 80 < low < 150
    assert 180 < high < 240


def test_dragging_the_brush_strip_zooms_and_double_click_shows_the_whole_run(page):
    x, y, width, height = box(page, "brush")
    page.drag(x + width * 0.6, x + width * 0.9, y + height / 2)
    low, high = steps_shown(page)
    assert low > 100
    assert high < 290
    page.run("document.getElementById('brush').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    assert steps_shown(page) == [0, 299]


def test_the_map_can_be_read_and_zoomed_from_the_keyboard(page):
    page.run("document.getElementById('heat').focus()")
    page.key("ArrowDown")
    page.key("ArrowRight")
    assert "layers.1.weight   step 1   ≈" in page.run("document.getElementById('readout').textContent")
    page.key("+")
    assert steps_shown(page)[1] < 200


def test_the_pointer_reads_out_row_step_and_value(page):
    x, y, width, height = box(page, "heat")
    page.point(x + width * 0.5, y + height * 0.5)
    text = page.run("document.getElementById('tip').textContent")
    assert re.search(r"≈ [\d.]+layers\.\d+\.weightstep \d+", text)


def colours_at(page, step, row):
    """The colours of the few pixels around a cell of the 300 steps and 12 rows."""
    _, _, width, height = box(page, "heat")
    left = float(page.run("document.getElementById('heat').dataset.left"))
    x, y = left + (width - left) * (step + 0.5) / 300, (row + 0.5) * (height - 24) / 12
    around = f"document.getElementById('heat').getContext('2d').getImageData({x - 12}, {y - 4}, 24, 8).data.buffer"
    return set(page.run(f"[...new Set(new Uint32Array({around}))]"))


def test_a_nan_is_painted_unlike_missing_and_unlike_any_number(page):
    nan, missing, number = colours_at(page, 280, 6), colours_at(page, 125, 2), colours_at(page, 125, 6)
    assert not nan & missing
    assert not nan & number
    assert not missing & number


def test_a_finding_is_listed_first_when_it_was_first_and_leads_to_its_place(page):
    assert page.run("document.querySelector('.finding .say').textContent") == "firstthe first NaN"
    page.run("document.querySelector('.finding .show').click()")
    low, high = steps_shown(page)
    assert low <= 250 <= high < 299


def test_the_cause_comes_before_a_graver_consequence_and_a_note_and_has_one_entry_for_all_ranks_and_steps(browser, tmp_path):
    names = tuple(f"layers.{i}.weight" for i in range(30))
    site = Site("parameter", names[0], "grad")
    found = [
        Finding("nonfinite", "error", "the first NaN", 40, Place(0, 2), Site("scalar", "loss", "value")),
        Finding("dead", "info", "a note", 3),
        *(
            Finding("replicas", "warning", "it differs", step, Place(r, 2), site, names=names)
            for step in (8, 12)
            for r in (0, 1)
        ),
    ]
    browser.errors.clear()
    browser.open(write_page(RunView("x", findings=found), tmp_path / "report.html"))
    shown = browser.run("[...document.querySelectorAll('.finding')].map(f => f.innerText)")
    assert [text.split()[0] for text in shown] == ["replicas", "nonfinite", "dead"]
    assert "step 8, ranks 0, 1, also at 1 later step, step 12" in shown[0]
    assert "all 30 names" in shown[0] and "layers.29.weight" not in shown[0]
    browser.run("document.querySelector('.finding summary').click()")
    assert "layers.29.weight" in browser.run("document.querySelector('.finding').innerText")
    assert browser.errors == []


def test_what_follows_from_a_cause_is_folded_under_it(browser, tmp_path):
    """The audit came upon the cause later than a rule upon its consequence."""

    def found(rule, severity, step, *names):
        return Finding(rule, severity, f"{rule} says", step, Place(0, 1), Site("parameter", names[0], "value"), names=names)

    told = [
        found("frozen", "warning", 10, "head.weight"),
        found("frozen", "warning", 12, "body.weight"),
        found("movement", "error", 20, "head.weight", "head.bias"),
        found("ownership", "error", 20, "head.weight", "head.bias"),
    ]
    written = write_page(RunView("x", findings=told), tmp_path / "report.html")
    browser.errors.clear()
    browser.open(written)
    rules = "[...document.querySelectorAll('{}')].map(f => f.querySelector('.mark a').textContent)"
    assert browser.run(rules.format("#finding-list > .finding")) == ["ownership", "frozen"]
    assert browser.run(rules.format(".following .finding")) == ["frozen", "movement"]
    assert browser.run("document.querySelector('.following summary').textContent") == "2 findings follow from this"
    shown = "document.getElementById('finding-3').checkVisibility({contentVisibilityAuto: true})"
    assert not browser.run(shown)
    browser.send("Page.navigate", url="about:blank")
    browser.open(written, "#finding-3")  # a hash unfolds what it names
    assert browser.run(shown) and browser.run("document.querySelector('.following').open")
    assert browser.errors == []


def test_the_findings_can_be_read_with_scripts_off(browser, tmp_path):
    written = write_page(a_run(), tmp_path / "report.html")
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.send("Page.navigate", url=written.as_uri())
        for _ in range(100):
            if browser.run("document.readyState") == "complete" and browser.run("location.href") == written.as_uri():
                break
            time.sleep(0.05)
        assert browser.run("document.documentElement.dataset.ready") is None
        read = browser.run("document.body.innerText")
        assert "The map and the curves need JavaScript" in read
        for told in a_run().findings:
            assert told.message in read and f"step {told.step}, rank {told.place.rank}" in read
            assert told.site.name in read
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize(
    ("place", "steps", "readout"),
    [
        ("#finding-1", (230, 269), "layers.4.weight   step 250"),  # a finding
        ("#steps=100-139", (100, 139), None),  # a zoom
        ("#metric=1&row=layers.3.weight&step=40", (0, 299), "layers.3.weight   step 40"),  # a place
    ],
)
def test_the_address_opens_a_finding_a_zoom_or_a_place(browser, tmp_path, place, steps, readout):
    browser.errors.clear()
    browser.send("Page.navigate", url="about:blank")
    browser.open(write_page(a_run(), tmp_path / "report.html"), place)
    assert tuple(steps_shown(browser)) == steps
    if readout:
        assert readout in browser.run("document.getElementById('readout').textContent")
    assert browser.run("document.getElementById('pick-metric').value") == ("means" if "metric=1" in place else "gradients")
    assert browser.errors == []


def choose(page, name, value, event):
    page.run(f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('{event}')) }})(document.getElementById('pick-{name}'))")


def test_other_statistics_ranks_and_colour_scales_can_be_picked(page):
    for name, value in (("scale", "linear"), ("scale", "row"), ("view", "2"), ("view", "spread"), ("metric", "means")):
        page.run(
            f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('change')) }})(document.getElementById('pick-{name}'))"
        )
        assert page.run(f"new Promise(r => setTimeout(() => r({SHADES}), 80))") > 5, (name, value)
    assert page.errors == []


def test_the_row_filter_keeps_the_rows_that_match(page):
    page.run("(e => { e.value = '11'; e.dispatchEvent(new Event('input')) })(document.getElementById('pick-rows'))")
    assert page.run("document.getElementById('heat').getAttribute('aria-label')").startswith(
        "gradients, norm, largest rank: 1 rows"
    )


@pytest.mark.parametrize("width", [1400, 500])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_body_never_scrolls_sideways(browser, tmp_path, width, scheme):
    browser.resize(width, 900)
    browser.scheme(scheme)
    try:
        browser.open(write_page(a_run(), tmp_path / "report.html"))
        assert browser.run("document.documentElement.scrollWidth") == width
    finally:
        browser.resize(1400, 1000)
        browser.scheme("light")


def test_a_run_with_nothing_in_it_has_a_page_that_says_so(browser, tmp_path):
    browser.errors.clear()
    browser.open(write_page(RunView("empty"), tmp_path / "report.html"))
    assert "No findings." in browser.run("document.body.innerText")
    assert browser.errors == []


@pytest.mark.slow
def test_a_page_of_a_large_run_is_bounded_and_unpacks_only_what_it_shows_first(browser, tmp_path):
    browser.open(write_page(large_run(), tmp_path / "report.html"))
    assert (tmp_path / "report.html").stat().st_size < 30e6
    assert float(browser.run("document.documentElement.dataset.unpacked")) < 1.5e6
    assert browser.run(SHADES) > 20


def test_text_from_the_run_cannot_end_the_script():
    assert render_page(a_run()).count("</script>") == render_page(RunView("x")).count("</script>") + blob_count(a_run())


def blob_count(run):
    return render_page(run).count('<script type="text/plain"')


def test_a_long_curve_keeps_its_peak_its_trough_and_its_nan():
    values = np.random.default_rng(0).normal(0, 1, 100_000)
    values[[31_234, 77_001, 50_000]] = 99, -99, np.nan
    kept = thin(values, 1000)
    assert {0, 31_234, 50_000, 77_001, 99_999} <= set(kept.tolist())
    assert kept.size < 1200


def test_values_of_the_wrong_shape_are_refused_with_the_shape_that_is_needed():
    with pytest.raises(UsageError, match=r"need \[ranks, 2, 3\]"):
        Metric("gradients", ["a", "b"], np.arange(3), np.zeros((1, 3, 2)))


def test_a_folder_that_does_not_exist_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(OutputError, match="choose another place with -o"):
        write_page(RunView("x"), tmp_path / "none" / "report.html")
