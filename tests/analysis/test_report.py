import html
import html.parser
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest

from analysis.answers.reasons import MAX_REASONS, failure_reasons
from analysis.answers.verdict import verdict
from analysis.cells.cells import CPU_CAVEAT
from analysis.frame.archive import read_archive
from analysis.frame.load import RAN_HERE
from analysis.metrics.definitions import BY_COLUMN
from analysis.page.page import render
from analysis.report import main, write_report
from bench.record import Provenance
from tests.analysis.predictions import make_predicted
from tests.analysis.records import (
    CPU,
    grid,
    make_failure,
    make_record,
    make_timing,
    of_attention,
    write_sweep,
)
from tests.analysis.synthetic import synthetic_records

FIGURE_FILES = {
    f"{name}.{kind}"
    for name in (
        "throughput",
        "peak_memory",
        "attention_exchange",
        "communication_share",
        "step_parts",
        "waterfall",
    )
    for kind in ("png", "svg")
}
EVIL = '<script>alert("x")</script>'


class Page(html.parser.HTMLParser):
    """Which tags and addresses a page has, and its text."""

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
        make_record(config={"strategy": "usp"}, timing=make_timing([[50.0]] * 2), trace=None, losses=None),
        make_failure("out_of_memory", EVIL, f"tail {EVIL}", config={"strategy": "ring"}),
        make_failure("timed_out", "no end", config={"strategy": "torch_cp"}),
    ]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A sweep's folder with its report, and what the command printed. Drawing takes seconds: once for all."""
    folder = write_sweep(tmp_path_factory.mktemp("sweep"), mixed())
    with redirect_stdout(StringIO()) as printed:
        write_report(folder)
    return folder, printed.getvalue()


@pytest.fixture
def folder(reported):
    return reported[0]


@pytest.fixture
def page_of(tmp_path, cells_of):
    """Records to the source of their page, without figures."""

    def page_of(records):
        archive = read_archive([write_sweep(tmp_path, records)], {})
        summary = cells_of(records)
        return render(archive, summary, verdict(summary), [], None)

    return page_of


def test_everything_is_rebuilt_from_the_records_alone(folder, tmp_path):
    shutil.copy(folder / "records.jsonl", tmp_path)
    write_report(tmp_path)
    figures = {f"figures/{name}" for name in FIGURE_FILES}
    for name in figures | {"summary.csv", "summary.md", "report.html"}:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert {path.name for path in (folder / "figures").iterdir()} == FIGURE_FILES
    assert all(path.stat().st_size > 1000 for path in (folder / "figures").iterdir())


FAILED_ALLOCATION = {
    "memory": "device",
    "requested_bytes": 3 * 2**30,
    "limit_bytes": None,
    "held_bytes": 70 * 2**30,
    "largest": [
        {
            "role": "activation",
            "dtype": "bfloat16",
            "shape": [8192, 64],
            "count": 36,
            "total_bytes": 5 * 2**30,
        }
    ],
}


def test_a_cell_that_ran_out_of_memory_shows_rank_phase_size_and_the_largest_classes(page_of):
    record = make_failure("out_of_memory", "no room")
    record["failure"] |= {"phase": "steps", "step_phase": "backward", "out_of_memory": FAILED_ALLOCATION}
    source = page_of([record])
    for text in ("rank 1, steps, backward", "3.0 GiB", "70.0 GiB", "8192 x 64", "5.0 GiB", "activation"):
        assert text in source
    assert "Largest classes of live blocks" in source
    assert "Largest classes of live blocks" not in page_of([make_record()])


def test_a_throttled_cell_says_so_in_the_table_and_on_the_page(page_of):
    telemetry = {
        "throttled": True,
        "clock_events": [["power_cap"], ["hardware_thermal"]],
        "load_average": 7.25,
    }
    source = page_of([make_record(telemetry=telemetry)])
    assert "throttled while timed (power_cap, hardware_thermal)" in source
    assert "7.25" in source


def test_a_peak_is_shown_with_the_part_of_the_step_that_reached_it(page_of):
    record = make_record()
    record["memory"] |= {"peak_phase": ["backward", "loss"], "whole_life_allocated_bytes": [3 * 2**30] * 2}
    source = page_of([record])
    assert "2.0 GiB in backward, 2.0 GiB in loss" in source
    assert "3.0 GiB, 3.0 GiB" in source


@pytest.mark.parametrize("records", [[], [make_record()], [make_failure("killed", "by whom?")]])
@pytest.mark.usefixtures("without_figures")
def test_any_number_of_usable_records_gives_a_report(tmp_path, records):
    write_report(write_sweep(tmp_path, records))
    assert '<table class="cells">' in (tmp_path / "report.html").read_text() or not records


def test_a_heading_says_what_its_column_means(page_of):
    source = page_of([of_attention(make_record())])
    heads = re.findall(r'<th scope="col" title="([^"]*)">([^<]*)</th>', source)
    said = {heading: html.unescape(title) for title, heading in heads}
    for heading, column in (
        ("tokens/s", "tokens_per_s"),
        ("peak allocated (of capacity)", "peak_allocated_bytes"),
        ("attention exchange: transfer", "attention_transfer_share"),
        ("attention exchange: waiting", "attention_waiting_share"),
        ("speed-up", "speed_up"),
        ("out, ulps (kernel alone)", "out_error_ulps"),
    ):
        assert said[heading] == BY_COLUMN[column].quantity.meaning
    assert "strategy" not in said


def test_a_malicious_reason_or_log_is_text_and_no_markup(folder):
    page = Page((folder / "report.html").read_text())
    assert page.tags.count("script") == 1  # the page's own
    assert EVIL in "".join(page.text)
    assert f"tail {EVIL}" in "".join(page.text)
    assert "<script" not in (folder / "summary.md").read_text()


def test_the_page_loads_nothing_from_anywhere(folder):
    addresses = Page((folder / "report.html").read_text()).addresses
    assert addresses
    assert all(address.startswith("#") for address in addresses)
    source = (folder / "report.html").read_text()
    assert not re.search(r"url\((?!#)|@import|<link|<img|<iframe", source)


def test_every_row_links_to_a_section_that_exists(folder):
    source = (folder / "report.html").read_text()
    links = set(re.findall(r'href="#(cell-[\w-]+)"', source))
    assert links == set(re.findall(r'<details class="cell" id="(cell-[\w-]+)"', source))
    assert len(links) == len(mixed())


def test_one_cell_on_two_machines_is_two_sections(page_of):
    records = [make_record(), make_record(environment={"device_name": "other"}, repeat=1)]
    assert len(set(re.findall(r'id="(cell-[\w-]+)"', page_of(records)))) == 2


GPUS = {
    "device_name": "NVIDIA H100",
    "gpu_nvlinks": [18, 18, 18],
    "gpu_topology": {"0-1": "PIX", "0-2": "SYS", "1-2": "SYS"},
    "gpu_p2p": {"0-1": "NVLink", "0-2": "NVLink", "1-2": "NVLink"},
    "nccl_version": "2.28.9",
    "inherited_env": {"NCCL_ALGO": "Ring"},
}


def test_the_page_says_how_gpus_are_connected_and_what_was_set_before(page_of):
    source = page_of([make_record(environment=GPUS)])
    shown = dict(re.findall(r"<dt>([^<]*)</dt>\s*<dd>([^<]*)</dd>", source))
    assert shown["gpu_topology"] == "PIX (0-1), SYS (0-2, 1-2)"
    assert shown["gpu_p2p"] == "NVLink (all 3 pairs)"
    assert (shown["nccl_version"], shown["variable NCCL_ALGO"]) == ("2.28.9", "Ring")
    assert "inherited_env" not in shown


def test_nan_never_appears_as_text(folder):
    text = "".join(Page((folder / "report.html").read_text()).text) + (folder / "summary.md").read_text()
    assert not re.search(r"\b(nan|NaN|None|NaT)\b|<NA>", text)


@pytest.mark.usefixtures("without_figures")
def test_page_and_summary_say_that_a_cpu_does_not_rank_strategies_and_what_was_not_checked(tmp_path):
    write_report(write_sweep(tmp_path, [make_record(config=CPU, checks=None)]))
    for name in ("report.html", "summary.md"):
        text = (tmp_path / name).read_text()
        assert CPU_CAVEAT in text
        assert "The records of 1 of 1 cell do not say what was checked." in text


def test_the_terminal_names_the_page_and_keeps_to_100_columns(reported):
    lines = reported[1].splitlines()
    assert lines[-1].endswith("report.html")
    assert all(len(line) <= 100 for line in lines[:-1])


@pytest.mark.usefixtures("without_figures")
def test_several_folders_make_one_report(tmp_path):
    folders = [write_sweep(tmp_path / name, grid([name], [8192])) for name in ("ulysses", "ring")]
    assert main([*map(str, folders), "--output", str(tmp_path / "both")]) == 0
    text = (tmp_path / "both" / "summary.md").read_text()
    assert "| ring |" in text
    assert "| ulysses |" in text
    assert not (folders[0] / "report.html").exists()


@pytest.mark.parametrize(
    "content", [None, "{broken}\n", '{"schema_version": 999}\n', '{"schema_version": 1}\n']
)
def test_a_folder_that_cannot_be_read_is_one_line_and_exit_code_2(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert str(tmp_path) in error


def test_a_command_imports_neither_torch_nor_hydra_nor_a_formula_matplotlib_to_draw_and_pyplot_never():
    code = """
import sys, analysis.compare, analysis.report
dear = {"torch", "hydra", "bench.cost.prediction", "bench.strategies", "matplotlib"}
assert not dear & sys.modules.keys()
import analysis.figures.figures
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_of_too_many_cells_the_page_shows_some_and_the_csv_all(tmp_path, monkeypatch):
    for limit in ("report.MAX_SHOWN_CELLS", "cells.selection.MAX_SHOWN_CELLS"):
        monkeypatch.setattr(f"analysis.{limit}", 100)
    monkeypatch.setattr(
        "analysis.figures.figures.figures_for", lambda _: ["throughput", "peak_memory", "scaling"]
    )
    write_report(write_sweep(tmp_path, synthetic_records(450)))
    page = (tmp_path / "report.html").read_text()
    assert len(re.findall(r'<details class="cell"', page)) == 100
    assert "Of 450 cells the 100 that were started last are listed" in page
    assert "series are drawn" in page
    assert re.findall(r'<figure id="figure-(\w+)"', page) == ["throughput", "peak_memory", "scaling"]
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 451
    assert "and 350 more cells; all cells are in summary.csv" in (tmp_path / "summary.md").read_text()


def test_a_page_whose_shown_cells_are_all_predicted_has_the_headings_of_its_whole_table(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("analysis.cells.selection.MAX_SHOWN_CELLS", 2)
    late = {"started_at": "2026-12-01T00:00:00+00:00"}
    expected = [make_predicted(config={"seq_len": length}) | late for length in (8192, 16384)]
    write_report(write_sweep(tmp_path, [*grid(["ulysses"], [8192, 16384]), *expected]))
    page = (tmp_path / "report.html").read_text()
    assert len(re.findall(r'<details class="cell"', page)) == 2


def test_many_reasons_and_many_settings_are_counted_not_listed(cells_of):
    summary = cells_of(
        [make_failure("error", f"reason{i}", config={"seed": i}) for i in range(MAX_REASONS + 5)]
    )
    assert failure_reasons(summary)[-1] == "5 more reasons, of 5 cells; all cells are in summary.csv"
    assert verdict(summary).failures == [f"Error: ulysses ({MAX_REASONS + 5} settings) at 8k."]


def test_synthetic_records_can_never_pass_for_results():
    assert {record["provenance"] for record in synthetic_records(10)} == {Provenance.SYNTHETIC}
    assert Provenance.SYNTHETIC not in RAN_HERE


@pytest.mark.usefixtures("without_figures")
def test_a_sweep_of_one_process_each_says_which_command_decides(tmp_path, capsys):
    environment = make_record()["environment"] | {"argv": ["run_sweep.py", "-m", "seq_len=8k"]}
    sweep = write_sweep(
        tmp_path / "out", grid(["ulysses", "ring"], [8192], environment=environment, wall_s=60)
    )
    assert main([str(sweep)]) == 0
    command = f"python run_sweep.py -m seq_len=8k measure.repeats=6 resume=true sweep_dir={sweep}"
    said = capsys.readouterr().out
    assert "Undecided: 8k (one process each)." in said
    assert f"would decide; run: {command} (about 10 min)\n" in said
    for name in ("summary.md", "report.html"):
        assert f"{command} (about 10 min)" in (sweep / name).read_text()


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    ("config", "seen", "newer"),
    [
        ({}, (), "on Hopper FlashAttention-3"),
        ({"hardware": "unknown"}, ("10.0", "10.0"), "on Blackwell FlashAttention-4"),
        ({"hardware": "a100_80gb"}, (), None),
        ({"kernel": "cudnn"}, (), None),
        ({"cluster.device": "cpu", "hardware": "cpu"}, (), None),
    ],
)
def test_of_newer_gpus_table_and_page_say_that_there_are_likely_faster_kernels(
    config, seen, newer, tmp_path, capsys
):
    environment = make_record()["environment"] | {"gpu_capabilities": seen}
    sweep = write_sweep(tmp_path, [make_record(config=config, environment=environment)])
    assert main([str(sweep)]) == 0
    said = [capsys.readouterr().out, *((sweep / name).read_text() for name in ("summary.md", "report.html"))]
    assert [text.count("is FlashAttention-2; ") for text in said] == [0 if newer is None else 1] * 3
    if newer is not None:
        assert all(f"is FlashAttention-2; {newer} or cuDNN is likely faster" in text for text in said[1:])


@pytest.mark.usefixtures("without_figures")
def test_all_is_written_although_nobody_reads_what_is_printed(tmp_path, monkeypatch):
    """As with `| head -1`."""

    class Closed(StringIO):
        def write(self, text):
            if text:
                raise BrokenPipeError
            return 0

    sweep = write_sweep(tmp_path, [make_record()])
    monkeypatch.setattr(sys, "stdout", Closed())
    assert main([str(sweep)]) == 0
    assert {"summary.csv", "summary.md", "report.html"} <= {each.name for each in sweep.iterdir()}


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("argv", [["train.py"], None])
def test_a_loop_of_one_s_own_is_not_told_to_run_our_command(tmp_path, capsys, argv):
    environment = make_record()["environment"] | ({"argv": argv} if argv else {})
    sweep = write_sweep(tmp_path / "out", grid(["ulysses", "ring"], [8192], environment=environment))
    assert main([str(sweep)]) == 0
    assert "would decide: run one sweep with measure.repeats=6.\n" in capsys.readouterr().out


def first_screen(source):
    return source[source.index('id="answer"') : source.index('id="cells"')]


def test_a_page_that_does_not_rank_shows_the_numbers_first_and_no_speed_up(page_of):
    source = page_of(
        [*grid(["local"], [8192]), make_record(config=CPU), make_record(config={"strategy": "ring"} | CPU)]
    )
    assert "<details>" not in first_screen(source)
    assert first_screen(source).count("81,920") == 3
    assert "speed-up" not in source


def test_a_page_that_ranks_shows_who_leads_unfolded(page_of):
    source = page_of(grid(["local", "ulysses"], [8192]))
    assert "<li>8k" in first_screen(source)
    assert "<details>" not in first_screen(source)
    assert "speed-up" in source


def test_the_first_screen_says_how_much_of_a_step_was_communication(page_of):
    said = "Communication that no compute hides took 7.3 % of a traced step (attention&#39;s exchange: 3.6 %)"
    assert said in first_screen(page_of([make_record()]))
    assert "Communication that no compute hides" not in page_of([make_record(config={"strategy": "local"})])


def test_the_table_has_at_most_ten_columns_and_then_the_details(page_of):
    for config in ({}, CPU):
        source = page_of([make_record(config=config)])
        heads = re.findall(
            r"<th[^>]*>([^<]*)</th>", re.search(r'<table class="cells">.*?</thead>', source, re.DOTALL)[0]
        )
        assert len(heads) == 11
        assert heads[-1] == "details"
        assert ("speed-up" in heads) == (config is not CPU)


def test_a_page_has_no_section_that_says_nothing(page_of, tmp_path):
    source = page_of([make_record()])
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", source)
    assert titles == ["Answer", "Cells", "Cell by cell", "Environment and provenance"]
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", page_of([])) == ["Answer", "Cells"]


@pytest.mark.parametrize("form", ["latex", "markdown"])
def test_the_summary_can_be_printed_as_a_table_alone(tmp_path, capsys, form):
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


def test_a_page_of_a_sweep_like_the_readme_s_is_small(folder):
    assert (folder / "report.html").stat().st_size < 600_000
