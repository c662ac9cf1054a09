import html
import html.parser
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest

from analysis.answers.no_result import MAX_REASONS, failure_reasons
from analysis.answers.verdict import verdict
from analysis.cells.cells import CPU_CAVEAT
from analysis.read.metrics import METRICS
from analysis.report import main, write_report
from analysis.show.page.page import render
from analysis.show.sections import sections_of
from bench.strategies import STRATEGIES
from tests.support.records import (
    CPU,
    grid,
    make_failure,
    make_predicted,
    make_record,
    make_timing,
    with_attention_calls,
    write_sweep,
)
from tests.support.sections import findings_of

FIGURES = (
    "throughput", "peak_memory", "attention_communication", "communication_share", "step_parts",
)  # fmt: skip
FIGURE_FILES = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
EVIL = '<script>alert("x")</script>'


class Page(html.parser.HTMLParser):
    """Tags, addresses and text of a page."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.addresses, self.text = [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.text.append(data)


def mixed():
    return [
        *grid(["local", "ulysses"], [8192, 65536]),
        make_record(environment={"device_name": "other"}, repeat=1),  # a cell of its own
        make_record(config={"strategy": "usp"}, timing=make_timing([[50.0]] * 2), trace=None, losses=None),
        make_failure("out_of_memory", EVIL, f"tail {EVIL}", config={"strategy": "ring"}),
        make_failure("timed_out", "no end", config={"strategy": "torch_cp"}),
    ]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Folder of a sweep with its report, and the printed text; made once, because drawing takes seconds."""
    folder = write_sweep(tmp_path_factory.mktemp("sweep"), mixed())
    with redirect_stdout(StringIO()) as printed:
        write_report(folder)
    return folder, printed.getvalue()


@pytest.fixture
def folder(reported):
    return reported[0]


@pytest.fixture
def page_of(tmp_path):
    """Function from records to the source of their page, without figures."""

    def page_of(records):
        findings = findings_of(tmp_path, records)
        return render(findings, sections_of(findings))

    return page_of


def test_report_is_rebuilt_from_the_records_alone(folder, tmp_path):
    shutil.copy(folder / "records.jsonl", tmp_path)
    write_report(tmp_path)
    figures = {f"figures/{name}" for name in FIGURE_FILES}
    for name in figures | {"summary.csv", "summary.md", "report.html"}:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert {path.name for path in (folder / "figures").iterdir()} == FIGURE_FILES
    assert all(path.stat().st_size > 1000 for path in (folder / "figures").iterdir())


LARGEST = {
    "role": "activation", "dtype": "bfloat16", "shape": [8192, 64], "count": 36, "total_bytes": 5 * 2**30,
}  # fmt: skip
FAILED_ALLOCATION = {
    "memory": "device", "requested_bytes": 3 * 2**30, "limit_bytes": None, "allocated_bytes": 70 * 2**30,
    "largest": [LARGEST],
}  # fmt: skip
THROTTLED = {"throttled": True, "clock_events": [["power_cap"], ["hardware_thermal"]], "load_average": 7.25}


def test_page_shows_failed_allocation_peak_and_throttling(page_of):
    failed = make_failure("out_of_memory", "no room")
    failed["failure"] |= {"phase": "steps", "step_phase": "backward", "out_of_memory": FAILED_ALLOCATION}
    worked = make_record(telemetry=THROTTLED, config={"strategy": "ring"})
    worked["memory"] |= {"peak_phase": ["backward", "loss"], "whole_life_allocated_bytes": [3 * 2**30] * 2}
    source = page_of([failed, worked])
    for text in (
        "rank 1, steps, backward", "3.0 GiB", "70.0 GiB", "8192 x 64", "5.0 GiB", "activation",
        "2.0 GiB in backward, 2.0 GiB in loss", "3.0 GiB, 3.0 GiB",
        "throttled while timed (power_cap, hardware_thermal)", "7.25",
    ):  # fmt: skip
        assert text in source
    assert source.count("Largest classes of live blocks") == 1


def test_report_of_a_sweep_without_records(tmp_path):
    write_report(write_sweep(tmp_path, []))
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", page) == ["Answer", "Cells"]
    assert "No cell has a timed result." in page


def test_page_headings_have_the_meaning_as_title(page_of):
    source = page_of([with_attention_calls(make_record())])
    heads = re.findall(r'<th scope="col" title="([^"]*)">([^<]*)</th>', source)
    said = {heading: html.unescape(title) for title, heading in heads}
    for heading, column in (("tokens/s", "tokens_per_s"), ("out, ulps (kernel alone)", "out_error_ulps")):
        assert said[heading] == METRICS[column].quantity.meaning
    assert "strategy" not in said


def test_page_escapes_text_loads_nothing_and_has_no_nan(folder):
    source, summary = ((folder / name).read_text() for name in ("report.html", "summary.md"))
    page = Page(source)
    text = "".join(page.text)
    assert page.tags.count("script") == 1  # the page's own
    assert f"tail {EVIL}" in text
    assert text.count(EVIL) > 1
    assert "<script" not in summary
    assert page.addresses
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import|<link|<img|<iframe", source)
    assert not re.search(r"\b(nan|NaN|None|NaT)\b|<NA>", text + summary)


def test_page_rows_link_to_existing_sections(folder):
    source = (folder / "report.html").read_text()
    links = set(re.findall(r'href="#(cell-[\w-]+)"', source))
    assert links == set(re.findall(r'<details class="cell" id="(cell-[\w-]+)"', source))
    assert len(links) == len(mixed())


GPUS = {
    "device_name": "NVIDIA H100",
    "gpu_nvlinks": [18, 18, 18],
    "gpu_topology": {"0-1": "PIX", "0-2": "SYS", "1-2": "SYS"},
    "gpu_p2p": {"0-1": "NVLink", "0-2": "NVLink", "1-2": "NVLink"},
    "nccl_version": "2.28.9",
    "inherited_env": {"NCCL_ALGO": "Ring"},
}


def test_page_shows_gpu_topology_and_inherited_variables(page_of):
    source = page_of([make_record(environment=GPUS)])
    shown = dict(re.findall(r"<dt>([^<]*)</dt>\s*<dd>([^<]*)</dd>", source))
    assert shown["gpu_nvlinks"] == "18, 18, 18"
    assert shown["gpu_topology"] == "PIX (0-1), SYS (0-2, 1-2)"
    assert shown["gpu_p2p"] == "NVLink (all 3 pairs)"
    assert (shown["nccl_version"], shown["variable NCCL_ALGO"]) == ("2.28.9", "Ring")
    assert "inherited_env" not in shown


def test_terminal_names_the_page_and_keeps_to_100_columns(reported):
    """Lines with a command may be longer, because a folded command cannot be copied."""
    lines = reported[1].splitlines()
    assert lines[-1].endswith("report.html")
    assert all(len(line) <= 100 for line in lines[:-1] if "run_sweep.py" not in line)


def test_commands_import_neither_torch_nor_hydra_nor_pyplot():
    code = """
import sys, analysis.compare, analysis.report
dear = {"torch", "hydra", "bench.extras.predict.prediction", "matplotlib"}
assert not dear & sys.modules.keys()
import analysis.show.figures.figures
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("without_figures")
def test_page_shows_the_last_cells_and_the_csv_all(tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.cells.selection.MAX_SHOWN_CELLS", 2)
    late = {"started_at": "2026-12-01T00:00:00+00:00"}
    predicted = [make_predicted(config={"seq_len": length}) | late for length in (8192, 16384)]
    write_report(write_sweep(tmp_path, [*grid([*STRATEGIES.built_in], [8192]), *predicted]))
    page, summary = ((tmp_path / name).read_text() for name in ("report.html", "summary.md"))
    count = len(STRATEGIES.built_in) + 2
    shown = re.findall(r'<details class="cell" id="cell-\d+-(\w+)"', page)
    assert shown == [record["cell_id"] for record in predicted]
    note = f"Only the last 2 of {count} started cells are listed; all cells are in summary.csv."
    assert all(note in text for text in (page, summary))
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == count + 1


def test_printed_table_has_all_cells(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("analysis.cells.selection.MAX_SHOWN_CELLS", 2)
    sweep = write_sweep(tmp_path, grid(["ring", "ulysses"], [8192, 16384]))
    assert main([str(sweep), "--table", "markdown"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 + 2


def test_many_reasons_and_settings_are_counted(cells_of):
    summary = cells_of(
        [make_failure("error", f"reason{i}", config={"seed": i}) for i in range(MAX_REASONS + 5)]
    )
    assert failure_reasons(summary)[-1] == "5 more reasons in 5 cells; all cells are in summary.csv"
    assert verdict(summary).failures == [f"Error: ulysses ({MAX_REASONS + 5} settings) at 8k."]


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("argv", [["run_sweep.py", "-m", "seq_len=8k"], ["train.py"], None])
def test_undecided_sweep_shows_the_command_that_decides(tmp_path, capsys, argv):
    environment = make_record()["environment"] | ({"argv": argv} if argv else {})
    sweep = write_sweep(
        tmp_path / "out", grid(["ulysses", "ring"], [8192], environment=environment, wall_s=60)
    )
    assert main([str(sweep)]) == 0
    command = f"python run_sweep.py -m seq_len=8k measure.repeats=6 resume=true sweep_dir={sweep}"
    is_ours = argv == ["run_sweep.py", "-m", "seq_len=8k"]
    way = f". Run: {command} (about 10 min)" if is_ours else ": run one sweep with measure.repeats=6."
    texts = [capsys.readouterr().out, *((sweep / name).read_text() for name in ("summary.md", "report.html"))]
    assert "undecided at 8k (one process each)" in texts[0]
    assert all(f"6 or more interleaved processes of each cell{way}" in text for text in texts)


def test_report_names_different_kernels_and_the_stand_in(cells_of):
    def lines_of(**kernels):
        configs = ({"strategy": name, "kernel": kernel} for name, kernel in kernels.items())
        notes = verdict(cells_of([make_record(config=config) for config in configs])).notes
        return [note for note in notes if "like for like" in note or "stand-in" in note]

    different = lines_of(ring_self_attention="math", ulysses="cudnn", ring_flash_attn="cudnn")
    assert different[0].startswith(
        "Not like for like: ring_flash_attn on cudnn; ring_self_attention on math; ulysses on cudnn."
    )
    assert different[1].startswith("stand-in for flash-attn: ring_flash_attn on kernel=cudnn")
    assert lines_of(ulysses="cudnn", ring="cudnn") == []
    failed = make_record(config={"kernel": "cudnn"}, status="wrong_result", reason="x", timing=None)
    line = "No cell on cudnn has a result; the results are those of other kernels."
    assert line in verdict(cells_of([failed, make_record(config={"kernel": "torch_flash"})])).notes


def first_screen(source):
    return source[source.index('id="answer"') : source.index('id="cells"')]


@pytest.mark.usefixtures("without_figures")
def test_unranked_page_has_caveat_numbers_and_no_speed_up(tmp_path):
    unchecked = make_record(config=CPU, checks=None)
    records = [*grid(["local"], [8192]), unchecked, make_record(config={"strategy": "ring"} | CPU)]
    write_report(write_sweep(tmp_path, records))
    source, summary = ((tmp_path / name).read_text() for name in ("report.html", "summary.md"))
    assert "<details>" not in first_screen(source)
    assert first_screen(source).count("81,920") == 3
    assert "speed-up" not in source
    for text in (source, summary):
        assert CPU_CAVEAT in text
        assert "The records of 1 of 3 cells do not say what was checked." in text


def test_ranked_page_shows_the_leader_and_a_short_table(page_of):
    source = page_of(grid(["local", "ulysses"], [8192]))
    assert "<li>8k" in first_screen(source)
    assert (
        "took 7.3 % of a traced step; attention&#39;s part, the column transfer, took 3.6 %."
        in first_screen(source)
    )
    assert "% of a traced step" not in page_of([make_record(config={"strategy": "local"})])
    assert "<details>" not in first_screen(source)
    head = re.search(r'<table class="cells">.*?</thead>', source, re.DOTALL)[0]
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", head)
    assert (len(heads), heads[-1], "speed-up" in heads) == (11, "details", True)


def test_page_has_no_empty_section(page_of):
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", page_of([make_record()]))
    assert titles == ["Answer", "Cells", "Cell by cell", "Environment and provenance"]


@pytest.mark.parametrize("form", ["latex", "markdown"])
def test_table_option_prints_the_table_alone(tmp_path, capsys, form):
    sweep = write_sweep(tmp_path, [make_record(config={"data": "50%_of_x"}), make_failure("error", "no")])
    assert main([str(sweep), "--table", form]) == 0
    printed = capsys.readouterr().out
    assert {each.name for each in sweep.iterdir()} == {"records.jsonl"}
    assert "81,920" in printed
    if form == "latex":
        assert printed.startswith(r"\begin{tabular}")
        assert r"95 \% interval" in printed
        assert printed.count(r"\\") == 3
    else:
        assert printed.startswith("| strategy | length |")
        assert len(printed.splitlines()) == 4
