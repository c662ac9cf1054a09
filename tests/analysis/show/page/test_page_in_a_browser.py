"""The page in headless Chromium. Each script runs in its own copy of the page."""

import html
import json
import re
import shutil
import subprocess

import pytest

from analysis.read.metrics import METRICS
from analysis.report import write_report
from bench.strategies import STRATEGIES
from tests.support.records import FAILED, grid, write_sweep

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=60000",
]  # fmt: skip
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH to open the page with")

HELPERS = """
const heads = [...document.querySelectorAll("table.cells thead th")];
const column = (name) => heads.findIndex((head) => head.textContent === name);
const click = (name) => heads[column(name)].querySelector("button").click();
const rows = () => [...document.querySelectorAll("table.cells tbody tr")].filter((row) => !row.hidden);
const values = (name) => rows().map((row) => row.cells[column(name)].dataset.value ?? null);
const type = (text) => {
  const filter = document.getElementById("filter");
  filter.value = text;
  filter.dispatchEvent(new Event("input"));
};
"""
WAIT = "new Promise((done) => setTimeout(done, 100))"


HOVER = """
const spot = document.querySelector(".spots rect"), shown = spot.closest("figure").querySelector(".pointed");
spot.dispatchEvent(new Event("pointerover", {bubbles: true}));
const hint = document.querySelector(".scrolls + .hint");
return [shown.textContent === spot.dataset.text, hint !== null && getComputedStyle(hint).display === "block"];
"""
LABELS = """
return [...document.querySelectorAll("figure")].map((figure) => {
  const outer = figure.querySelector("svg").getBoundingClientRect();
  const labels = [...figure.querySelectorAll("svg text")].filter((each) => each.textContent.trim());
  const boxes = labels.map((each) => [each.textContent, each.getBoundingClientRect()]);
  const scale = outer.width / figure.querySelector("svg").viewBox.baseVal.width;
  const size = (each) => parseFloat(getComputedStyle(each).fontSize) * scale;
  const meet = (a, b) => a.left + 1 < b.right && b.left + 1 < a.right
    && a.top + 1.5 < b.bottom && b.top + 1.5 < a.bottom;
  return {
    name: figure.id, width: outer.width,
    cut: boxes.filter(([, box]) => box.left < outer.left - 1 || box.right > outer.right + 1
      || box.top < outer.top - 1 || box.bottom > outer.bottom + 1).map(([text]) => text),
    over: boxes.flatMap(([one, a], number) => boxes.slice(number + 1)
      .filter(([, b]) => meet(a, b)).map(([other]) => [one, other])),
    smallest: Math.min(...labels.map(size)),
  };
});
"""
UNFOLDED = """
document.getElementById("open-all").click();
document.querySelectorAll("details").forEach((each) => (each.open = true));
const root = document.documentElement;
return {inner: window.innerWidth, content: root.scrollWidth, visible: root.clientWidth};
"""
LEGIBLE_PX = 8
SCRIPTS = {
    "clicks on a heading": """
        click("tokens/s"); const up = values("tokens/s"); const states = [heads[4].ariaSort];
        click("tokens/s"); states.push(heads[4].ariaSort);
        return [up, values("tokens/s"), states];
    """,
    "words of a column": 'click("strategy"); return [values("strategy"), heads[column("tokens/s")].title];',
    "words": """
        type("ULYSSES  64k"); const some = rows().map((row) => row.textContent);
        const count = document.getElementById("count").textContent;
        type("no such word"); const none = rows().length; type("");
        return {some, count, none, all: rows().length};
    """,
    "links and buttons": f"""
        const open = () => document.querySelectorAll("details.cell[open]").length;
        const link = document.querySelectorAll("table.cells a")[7], counts = [open()];
        location.hash = link.hash; await {WAIT};
        const target = document.getElementById(link.hash.slice(1)).open; counts.push(open());
        document.getElementById("open-all").click(); counts.push(open());
        document.getElementById("close-all").click(); counts.push(open());
        return {{target, counts}};
    """,
    "the keyboard": """
        document.getElementById("open-all").click();
        const acting = [...document.querySelectorAll("thead button, #filter, summary, table a, .wide")];
        const focused = acting.filter((each) => { each.focus(); return document.activeElement === each; });
        return [acting.length, focused.length];
    """,
}
AT_WIDTHS = {
    "points": (HOVER, (390, 1400)),
    "labels": (LABELS, (390, 1400)),
    "unfolded": (UNFOLDED, (320, 768)),
}
"""Scripts with the widths of their pages in pixels."""
RUN_SCRIPTS = """
const results = {};
for (const [name, width, script] of scripts) {
  const frame = document.createElement("iframe");
  [frame.width, frame.height] = [width, 700];
  document.body.append(frame);
  frame.getBoundingClientRect();  // lay out the frame before its page is loaded
  const result = new Promise((resolve) => (window.report = resolve));
  frame.srcdoc = source.replace("</body>", () => script + "</body>");
  results[name] = await result;
  frame.remove();
}
document.getElementById("results").textContent = JSON.stringify(results);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the source of a page with 60 cells, one of which failed with a long reason."""
    lengths = [1024 * thousands for thousands in (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)]
    cells, long_reason = (
        grid([*STRATEGIES.built_in][:6], lengths),
        "a/very/long/path/without/any/place/to/break" * 20,
    )
    cells[-1] |= FAILED | {"status": "out_of_memory", "reason": long_reason}
    folder = write_sweep(tmp_path_factory.mktemp("page"), cells)
    write_report(folder)
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def results(page, tmp_path_factory):
    """Return the results of all scripts by name."""
    folder = tmp_path_factory.mktemp("browser")
    scripts = [[name, 1200, in_page(script)] for name, script in SCRIPTS.items()]
    scripts += [
        [f"{name}, {width}", width, in_page(script)]
        for name, (script, widths) in AT_WIDTHS.items()
        for width in widths
    ]
    source = json.dumps({"source": page, "scripts": scripts}).replace("</", r"<\/")
    (folder / "driven.html").write_text(
        '<!doctype html><meta charset="utf-8"><body><pre id="results"></pre>'
        f"<script>const {{source, scripts}} = {source}; (async () => {{ {RUN_SCRIPTS} }})();</script>"
    )
    process = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile", "--dump-dom", f"file://{folder}/driven.html"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "CONSOLE" not in process.stderr, process.stderr
    return json.loads(
        html.unescape(re.search(r'<pre id="results">(.*?)</pre>', process.stdout, re.DOTALL)[1])
    )


def in_page(script):
    """Return a script that runs on load and reports its result, or its error, to the parent page."""
    return (
        f"<script>window.addEventListener('load', async () => {{ {HELPERS}\n"
        f"const run = async () => {{ {script} }};"
        "parent.report(await run().catch((error) => `failed: ${error}`)); });</script>"
    )


def test_heading_click_sorts_and_second_click_reverses(results):
    up, down, states = results["clicks on a heading"]
    numbers = sorted(float(each) for each in up[:-1])
    assert [float(each) for each in up[:-1]] == numbers
    assert [float(each) for each in down[:-1]] == numbers[::-1]
    assert up[-1] is down[-1] is None
    assert states == ["ascending", "descending"]
    strategies, meaning = results["words of a column"]
    assert strategies == sorted(strategies)
    assert meaning == METRICS["tokens_per_s"].quantity.meaning


def test_filter_words_narrow_the_table_and_show_the_count(results):
    words = results["words"]
    assert words["some"]
    assert all("ulysses" in text and "64k" in text for text in words["some"])
    assert words["count"] == f"{len(words['some'])} of 60 shown"
    assert (words["none"], words["all"]) == (0, 60)


def test_link_opens_its_cell_and_buttons_open_and_close_all(results):
    assert results["links and buttons"] == {"target": True, "counts": [0, 1, 60, 0]}


def test_keyboard_reaches_every_control(results):
    reached, focused = results["the keyboard"]
    assert reached == focused > 60


def test_hover_shows_a_value_and_wide_tables_show_a_hint(results):
    assert results["points, 1400"][0] is True
    assert results["points, 390"] == [True, True]


@pytest.mark.parametrize("width", AT_WIDTHS["labels"][1])
def test_figure_labels_are_whole_apart_and_legible(results, width):
    figures = results[f"labels, {width}"]
    assert len(figures) > 4
    for figure in figures:
        assert (figure["name"], figure["cut"], figure["over"]) == (figure["name"], [], [])
        assert figure["smallest"] >= LEGIBLE_PX


@pytest.mark.parametrize("width", AT_WIDTHS["unfolded"][1])
def test_narrow_page_never_scrolls_sideways(results, width):
    page = results[f"unfolded, {width}"]
    assert page["inner"] == width
    assert page["content"] <= page["visible"]
