"""The page of an evaluation in a browser: a phone and a desk, by day and by night."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import evaluations
import numpy as np
import pytest
from PIL import Image

from drafthead.inference.report import write_evaluation

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
DARK, LIGHT = 0, 1
PHONE, DESK = 390, 1280

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH: {', '.join(NAMES)}"),
]

# Opens all that is folded, then writes what it finds into the page around. Contrast is WCAG's.
PROBE = """
<script>
for (const d of document.querySelectorAll("details")) d.open = true;
const rgb = c => c.match(/[\\d.]+/g).map(Number);
const light = c => { const [r, g, b] = rgb(c).map(v => v / 255).map(
  v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + .05) / (y + .05); };
const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  const v = rgb(c); if (v.length < 4 || v[3] > 0) return c; } return "rgb(255, 255, 255)"; };
const own = e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim());
let least = [99, ""], thin = [99, ""], wide = [];
for (const e of document.querySelectorAll("main *")) {
  const style = getComputedStyle(e), drawn = e instanceof SVGElement;
  if (own(e)) { const found = contrast(drawn ? style.fill : style.color, behind(e));
    if (found < least[0]) least = [found, e.outerHTML.slice(0, 200)]; }
  if (drawn && e.tagName == "path" && style.fill == "none" && style.stroke != "none" &&
      e.closest("[id*=line2d]") && !e.closest("[id*=xtick], [id*=ytick]")) {
    const found = contrast(style.stroke, behind(e));
    if (found < thin[0]) thin = [found, e.outerHTML.slice(0, 200)]; }
  if (!e.closest(".scroll table") && e.getBoundingClientRect().right > innerWidth + .5)
    wide.push(e.outerHTML.slice(0, 200));
}
const figures = [...document.querySelectorAll("figure")].map(f => { const svg = f.querySelector("svg"),
  b = svg.getBoundingClientRect(); return { name: f.id, box: [b.x, b.y + scrollY, b.width, b.height],
  font: parseFloat(getComputedStyle(svg.querySelector("text")).fontSize) * b.width / svg.viewBox.baseVal.width,
  marks: [...svg.querySelectorAll("[id*=line2d] use, [id*=patch] path, [id*=LineCollection] path")].filter(
    e => !e.closest("[id*=tick]") && (!e.closest("[id*=patch]") || getComputedStyle(e).fill != "none")).length }; });
parent.document.getElementById("probe").textContent = JSON.stringify({
  width: innerWidth, scroll: document.documentElement.scrollWidth,
  title: document.title, least, thin, wide, figures,
  columns: new Set(figures.map(f => f.box[0])).size, asked: performance.getEntriesByType("resource").length,
  inside: [...document.querySelectorAll(".scroll")].some(e => e.scrollWidth > e.clientWidth) });
</script>
"""  # noqa: E501


FRAME = """<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<pre id="probe"></pre><iframe style="border: 0; width: {width}px; height: 800px" srcdoc="{page}">
</iframe>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "certificate.json").write_text(json.dumps(evaluations.CERTIFICATE))
    return write_evaluation(folder, evaluations.result(), [(i, 5 / (1 + i)) for i in range(9)])


@pytest.fixture(scope="module")
def phone(page: Path) -> dict[str, Any]:
    return seen(page, PHONE, DARK)


def browse(page: Path, width: int, height: int, scheme: int, *options: str) -> str:
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={page.parent / 'profile'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--window-size={width},{height}",
            "--virtual-time-budget=1000",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


def seen(page: Path, width: int, scheme: int) -> dict[str, Any]:
    """What the probe finds in a frame of this width: no window is as narrow as a phone."""
    inner = page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>")
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.format(width=width, page=escape(inner)), encoding="utf-8")
    shown = browse(frame, 1400, 800, scheme, "--dump-dom")
    found = re.search(r'<pre id="probe">(.+?)</pre>', shown, re.S)
    assert found, shown[-500:]
    measured: dict[str, Any] = json.loads(unescape(found[1]))
    assert measured["width"] == width
    return measured


def check(found: dict[str, Any]) -> None:
    """What holds in any window."""
    assert found["scroll"] <= found["width"]
    assert found["wide"] == []
    assert found["asked"] == 0, "of the network or of another file"
    contrast, where = found["least"]
    assert contrast >= 4.5, where
    contrast, where = found["thin"]
    assert 3 <= contrast < 99, where
    for figure in found["figures"]:
        assert figure["marks"] >= 4, figure
        assert figure["font"] >= 9.5, figure


def test_on_a_phone_by_night_nothing_overflows_and_all_can_be_read(phone: dict[str, Any]) -> None:
    check(phone)
    assert len(phone["figures"]) == 8
    assert phone["columns"] == 1
    assert phone["inside"], "a wide table scrolls in its own box"


def test_every_figure_is_drawn(page: Path, phone: dict[str, Any]) -> None:
    """With marks of many colours on the dark page, where the browser says that it is."""
    picture = page.with_name("page.png")
    height = max(round(y + tall) for _, y, _, tall in (f["box"] for f in phone["figures"])) + 40
    browse(page, PHONE, height, DARK, f"--screenshot={picture}")
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels[-1, -1].max() < 60, "a dark page"
    for figure in phone["figures"]:
        x, y, width, height = map(round, figure["box"])
        part = pixels[y : y + height, x : x + width].reshape(-1, 3)
        coloured = np.ptp(part, axis=1) > 60
        assert 0.001 < coloured.mean() < 0.5, figure
        assert (part.min(axis=1) > 180).mean() > 0.003, "light text and axes"


def test_at_a_desk_by_day_figures_stand_side_by_side(page: Path) -> None:
    found = seen(page, DESK, LIGHT)
    check(found)
    assert found["columns"] == 2
    assert not any(said in found["title"] for said in ("Lossy", "harmed"))


def test_text_that_would_do_harm_does_none(tmp_path: Path) -> None:
    found = seen(write_evaluation(tmp_path, evaluations.hostile()), PHONE, LIGHT)
    check(found)
    assert found["title"] != "harmed"
