"""The page as a reader uses it, in headless Chromium, driven by scripts, each in a copy of the page."""

import html
import json
import re
import shutil
import subprocess

import pytest

from analysis.metrics.definitions import BY_COLUMN
from analysis.report import write_report
from tests.analysis.figures.test_figures import NARROW_PX, WIDE_PX
from tests.analysis.records import make_failure, write_sweep
from tests.analysis.synthetic import synthetic_records

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--enable-logging=stderr",
    "--virtual-time-budget=60000",
]
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


POINTED = """
const drawing = document.querySelector(".drawing"), picture = drawing.querySelector("img");
const spots = [...drawing.querySelectorAll("svg")].find((each) => getComputedStyle(each).display !== "none");
const spot = spots.querySelector("rect");
spot.scrollIntoView();
const [one, two, place] = [picture, spots, spot].map((each) => each.getBoundingClientRect());
const [x, y] = [place.x + place.width / 2, place.y + place.height / 2];
document.elementFromPoint(x, y).dispatchEvent(new Event("pointerover", {bubbles: true}));
const said = document.querySelector(".pointed").textContent;
const hints = [...document.querySelectorAll(".scrolls + .hint")];
return {
  said, titles: [...spots.querySelectorAll("title")].map((each) => each.textContent),
  apart: Math.max(Math.abs(one.width - two.width), Math.abs(one.height - two.height)),
  picture: one.width, shape: one.height / one.width,
  hints: hints.map((each) => getComputedStyle(each).display),
};
"""
UNFOLDED = """
document.getElementById("open-all").click();
document.querySelectorAll("details").forEach((each) => (each.open = true));
const root = document.documentElement;
return {inner: window.innerWidth, content: root.scrollWidth, visible: root.clientWidth};
"""
NARROW_WIDTHS = (320, 360, 768)
SCRIPTS = {
    "clicks on a heading": """
        click("tokens/s"); const up = values("tokens/s"); const states = [heads[4].ariaSort];
        click("tokens/s"); states.push(heads[4].ariaSort);
        return [up, values("tokens/s"), states];
    """,
    "meanings": 'return [heads[column("tokens/s")].title, heads[column("strategy")].title];',
    "lengths and strategies": """
        click("length"); const up = values("length"); click("strategy"); return [up, values("strategy")];
    """,
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
    "a point, wide": POINTED,
    "a point, narrow": POINTED,
    **{f"unfolded, {width}": UNFOLDED for width in NARROW_WIDTHS},
}
WIDTHS = {
    "a point, wide": 1400,
    "a point, narrow": 390,
    **{f"unfolded, {width}": width for width in NARROW_WIDTHS},
}
IN_TURNS = """
const found = {};
for (const [name, width, script] of scripts) {
  const frame = document.createElement("iframe");
  [frame.width, frame.height] = [width, 700];
  document.body.append(frame);
  frame.getBoundingClientRect();  // its width stands before the page in it chooses among its pictures
  const told = new Promise((tell) => (window.tell = tell));
  frame.srcdoc = source.replace("</body>", () => script + "</body>");
  found[name] = await told;
  frame.remove();
}
document.getElementById("found").textContent = JSON.stringify(found);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The source of a page of 61 cells."""
    folder = tmp_path_factory.mktemp("page")
    long_reason = "a/very/long/path/without/any/place/to/break" * 20
    records = [*synthetic_records(60), make_failure("out_of_memory", long_reason, long_reason)]
    write_report(write_sweep(folder, records))
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def found(page, tmp_path_factory):
    """What each of SCRIPTS returns, by name: each has the page to itself, one after the other."""
    folder = tmp_path_factory.mktemp("browser")
    scripts = [[name, WIDTHS.get(name, 1200), in_page(script)] for name, script in SCRIPTS.items()]
    given = json.dumps({"source": page, "scripts": scripts}).replace("</", r"<\/")
    (folder / "driven.html").write_text(
        '<!doctype html><meta charset="utf-8"><body><pre id="found"></pre>'
        f"<script>const {{source, scripts}} = {given}; (async () => {{ {IN_TURNS} }})();</script>"
    )
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile", "--dump-dom", f"file://{folder}/driven.html"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


def in_page(script):
    """A script that runs when the page is there and tells the one around it what it returns, or its error."""
    return (
        f"<script>window.addEventListener('load', async () => {{ {HELPERS}\n"
        f"const run = async () => {{ {script} }};"
        "parent.tell(await run().catch((error) => `failed: ${error}`)); });</script>"
    )


def test_a_click_on_a_heading_sorts_by_number_and_another_turns_it_round(found):
    up, down, states = found["clicks on a heading"]
    numbers = sorted(float(each) for each in up if each is not None)
    assert len(numbers) > 40
    assert [float(each) for each in up[: len(numbers)]] == numbers
    assert [float(each) for each in down[: len(numbers)]] == numbers[::-1]
    assert set(up[len(numbers) :]) == set(down[len(numbers) :]) == {None}
    assert states == ["ascending", "descending"]


def test_a_heading_that_was_made_a_button_still_says_what_it_means(found):
    assert found["meanings"] == [BY_COLUMN["tokens_per_s"].quantity.meaning, ""]


def test_lengths_sort_as_lengths_and_strategies_as_words(found):
    lengths, strategies = found["lengths and strategies"]
    assert [int(each) for each in lengths] == sorted(int(each) for each in lengths)
    assert strategies == sorted(strategies)
    assert len(set(strategies)) > 3


def test_words_narrow_the_table_and_it_says_to_how_many(found):
    told = found["words"]
    assert told["some"]
    assert all("ulysses" in text and "64k" in text for text in told["some"])
    assert told["count"] == f"{len(told['some'])} of 61 shown"
    assert (told["none"], told["all"]) == (0, 61)


def test_a_link_opens_what_it_points_at_and_the_buttons_open_and_close_all(found):
    assert found["links and buttons"] == {"target": True, "counts": [0, 1, 61, 0]}


def test_everything_that_acts_is_reached_with_the_keyboard(found):
    reached, focused = found["the keyboard"]
    assert reached == focused > 61


def test_a_point_says_its_numbers_in_the_drawing_that_fits_the_page(found):
    wide, narrow = (found[f"a point, {which}"] for which in ("wide", "narrow"))
    for told in (wide, narrow):
        assert told["said"] in told["titles"]
        assert told["apart"] < 4  # the picture's border is 1 px
        assert set(told["hints"]) == {"block"}
    assert wide["picture"] >= WIDE_PX
    assert narrow["picture"] >= NARROW_PX
    assert narrow["shape"] > 1.1 * wide["shape"]


@pytest.mark.parametrize("width", NARROW_WIDTHS)
def test_a_narrow_page_never_scrolls_sideways(found, width):
    told = found[f"unfolded, {width}"]
    assert told["inner"] == width
    assert told["content"] <= told["visible"]
