"""`python -m benchmarks.screenshots` has each kind of page, and each is made of a run that shows what was planted."""

from __future__ import annotations

import pytest
from PIL import Image

from benchmarks import screenshots
from tests.monitor.report.chromium import Browser, require_chromium


def test_a_needle_in_a_loss_is_told_of_on_the_page_of_a_run_without_findings(tmp_path):
    page = screenshots.make_pages(tmp_path, ["report-needle"])["report-needle"].read_text(encoding="utf-8")
    assert "No findings." in page and 'class="calm"' not in page
    assert '<p id="jump">Largest jump of loss: step 150, ' in page


def test_a_run_that_ends_with_another_exit_code_is_not_what_is_shown(tmp_path, monkeypatch):
    make, _ = screenshots.PAGES["ckpt-compare"]
    monkeypatch.setitem(screenshots.PAGES, "ckpt-compare", (make, 0))
    with pytest.raises(RuntimeError, match="ckpt-compare ended with 2, not 0"):
        screenshots.make_pages(tmp_path, ["ckpt-compare"])


@pytest.mark.slow
def test_a_page_is_seen_on_each_screen_in_light_and_dark(tmp_path):
    (tmp_path / "whole").mkdir()
    browser = Browser(require_chromium())
    try:
        pages = screenshots.make_pages(tmp_path, ["ckpt-compare"])
        assert screenshots.take(browser, "ckpt-compare", pages["ckpt-compare"], tmp_path) == []
        wide = tmp_path / "wide.html"
        wide.write_text(
            '<html data-ready="1"><meta name="viewport" content="width=device-width"><p style="width: 500px">wide</p><img src="http://127.0.0.1:1/x.png">',
            "utf-8",
        )
        wrong = screenshots.take(browser, "wide", wide, tmp_path)
    finally:
        browser.close()
    assert [line for line in wrong if "pixels wide" in line] == [
        f"wide-390x844-{s}: 508 pixels wide" for s in ("light", "dark")
    ]
    assert len([line for line in wrong if "asks for http://127.0.0.1:1/x.png" in line]) == 6
    for width, height in screenshots.SCREENS:
        shades = []
        for scheme in screenshots.SCHEMES:
            with Image.open(tmp_path / f"ckpt-compare-{width}x{height}-{scheme}.png") as shot:
                assert shot.size == (width, height)
                shades.append(sum(shot.convert("RGB").getpixel((3, height - 3))))
            with Image.open(tmp_path / "whole" / f"ckpt-compare-{width}x{height}-{scheme}.png") as whole:
                assert whole.width == width and whole.height >= height
        assert shades[0] > 600 > 150 > shades[1]
