"""The page as a reader uses it, in headless Chromium, driven by scripts, each in a copy of the page."""

import html
import json
import re
import shutil
import statistics
import subprocess

import pytest

from analysis.labels import bytes_label
from analysis.metrics.definitions import BY_COLUMN
from analysis.report import write_report
from bench.labels import length_label
from tests.analysis.records import make_failure, make_trace, write_sweep
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
const found = [...document.querySelectorAll("figure")].map((figure) => {
  const said = figure.querySelector(".pointed");
  const spots = [...figure.querySelectorAll(".spots rect")].map((spot) => {
    const {x, y, width, height} = spot.getBoundingClientRect();
    spot.dispatchEvent(new Event("pointerover", {bubbles: true}));
    return {said: said.textContent, x: x + width / 2, y: y + height / 2};
  });
  const marks = [...figure.querySelectorAll("use")].map((each) => each.getBoundingClientRect());
  return {
    name: figure.id, spots,
    marks: marks.map(({x, y, width, height}) => [x + width / 2, y + height / 2]),
  };
});
const hints = [...document.querySelectorAll(".scrolls + .hint")];
return {found, hints: hints.map((each) => getComputedStyle(each).display)};
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
NARROW_WIDTHS = (320, 360, 768)
SHOWN_WIDTHS = (1400, 390)
LEGIBLE_PX = 8
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
    **{f"points, {width}": POINTED for width in SHOWN_WIDTHS},
    **{f"labels, {width}": LABELS for width in SHOWN_WIDTHS},
    **{f"unfolded, {width}": UNFOLDED for width in NARROW_WIDTHS},
}
WIDTHS = {
    **{f"{what}, {width}": width for what in ("points", "labels") for width in SHOWN_WIDTHS},
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
def records():
    """60 synthetic cells, with traces where they ran, and a failure with a long reason."""
    long_reason = "a/very/long/path/without/any/place/to/break" * 20
    cells = [record | {"trace": record["trace"] and traced(record)} for record in synthetic_records(60)]
    return [*cells, make_failure("out_of_memory", long_reason, long_reason)]


def traced(record):
    """A trace of this record's own step, which its ranks spent as those of make_trace did."""
    step_ms, trace = record["trace"]["step_ms"], make_trace(len(record["trace"]["step_ms"]))
    return scaled(trace, step_ms[0] / trace["step_ms"][0])


def scaled(section, factor, *, is_ms=False):
    """All times of a section, times the factor."""
    if isinstance(section, dict):
        return {
            key: scaled(each, factor, is_ms=is_ms or key.endswith("_ms")) for key, each in section.items()
        }
    if isinstance(section, list):
        return [scaled(each, factor, is_ms=is_ms) for each in section]
    return section * factor if is_ms else section


@pytest.fixture(scope="module")
def page(records, tmp_path_factory):
    """The source of their page."""
    folder = tmp_path_factory.mktemp("page")
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


def tokens_per_s(record):
    """From the raw record: whole-sequence tokens over the median step of the slowest rank."""
    timing = record["timing"]
    slowest = [max(step) for step in zip(*timing["step_times_ms"], strict=True)]
    return 1000 * timing["tokens_per_step"] / statistics.median(slowest)


@pytest.mark.parametrize("width", SHOWN_WIDTHS)
def test_what_is_said_where_a_point_stands_is_the_record_s_value(found, records, width):
    told = found[f"points, {width}"]
    if width == min(SHOWN_WIDTHS):  # there a table is wider than the page, and says so
        assert {*told["hints"]} == {"block"}
    figures = {each["name"]: each for each in told["found"]}
    expected = {
        (record["config"]["strategy"], length_label(record["config"]["seq_len"])): (
            f"{tokens_per_s(record):,.0f} tokens/s",
            bytes_label(max(record["memory"]["peak_allocated_bytes"])),
        )
        for record in records
        if record["status"] == "ok"
    }
    for number, name in enumerate(("figure-throughput", "figure-peak_memory")):
        figure = figures[name]
        said = [spot["said"] for spot in figure["spots"]]
        assert len(said) == len(expected)
        for (strategy, length), values in expected.items():
            assert any(
                re.match(rf"{strategy}(, [^:]*)?, {length}: {re.escape(values[number])}", each)
                for each in said
            )
        for spot in figure["spots"]:
            assert min(max(abs(spot["x"] - x), abs(spot["y"] - y)) for x, y in figure["marks"]) < 2


@pytest.mark.parametrize("width", SHOWN_WIDTHS)
def test_no_label_of_a_figure_is_cut_off_overlaps_another_or_is_too_small(found, width):
    told = found[f"labels, {width}"]
    assert len(told) > 4
    for figure in told:
        assert (figure["name"], figure["cut"], figure["over"]) == (figure["name"], [], [])
        assert figure["smallest"] >= LEGIBLE_PX


@pytest.mark.parametrize("width", NARROW_WIDTHS)
def test_a_narrow_page_never_scrolls_sideways(found, width):
    told = found[f"unfolded, {width}"]
    assert told["inner"] == width
    assert told["content"] <= told["visible"]
