"""Reports on sweeps of predictions, and on measurements that were predicted."""

import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path

import pytest

from analysis.report import write_report
from bench.common.environment import REPOSITORY
from bench.plan.planned import planned_cell
from bench.run.cell.outcome import outcome
from bench.run.cell.run import run
from tests.support.cells import TWO_CORES, make_cell
from tests.support.records import (
    as_line,
    make_predicted,
    make_record,
    make_timing,
    with_prediction,
    write_sweep,
)

PAGE = (REPOSITORY / "docs" / "predict.md").read_text()
WORDS = ("mode=predict", "hardware=h100_80gb", "model=qwen3_4b", "cluster.world_size=4", "loss=untiled")
OF_SAMPLES = (
    "n=1", "one process", "processes of each cell", "95 % interval", "do not say what was checked",
    "passed every check", "A decision needs", "ran once", "traced step by traced step",
)  # fmt: skip


LENGTHS = [1024 * thousands for thousands in (8, 16, 32, 64, 256)]


@pytest.fixture(scope="module")
def records():
    cells = [make_cell(*WORDS, f"strategy={strategy}", "seq_len=8k") for strategy in ("ulysses", "ring")]
    return [
        run(planned_cell(replace(cell, seq_len=length), TWO_CORES), None, Path())
        for cell in cells
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def told(records, tmp_path_factory):
    """The terminal, summary.md and the page of real predictions; other tests look at figures."""
    folder = write_sweep(tmp_path_factory.mktemp("sweep"), [as_line(record) for record in records])
    with redirect_stdout(StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.report.draw_figures", lambda *_: [])
        write_report(folder)
    names = {"md": "summary.md", "page": "report.html"}
    files = {name: (folder / file).read_text() for name, file in names.items()}
    return {"terminal": printed.getvalue()} | files


@pytest.mark.parametrize("where", ["terminal", "md", "page"])
def test_report_of_predictions_has_bands_and_no_samples(told, where):
    text = " ".join(told[where].split())
    assert not [words for words in OF_SAMPLES if words in text]
    assert "OOM (predicted)" in text
    assert "the band of the model, not a confidence interval" in text


@pytest.mark.usefixtures("without_figures")
def test_predict_page_shows_what_its_command_prints(tmp_path, capsys):
    command, output = re.findall(r"(?:^ {4}.*\n)+", PAGE, re.MULTILINE)
    axes = [word.partition("=") for word in command.split()[3:]]
    choices = [[f"{key}={value}" for value in values.split(",")] for key, _, values in axes]
    cells = {cell.cell_id: cell for cell in (make_cell(*words) for words in product(*choices))}
    planned = [planned_cell(cell, TWO_CORES) for cell in cells.values()]
    records = [as_line(run(each, None, Path())) for each in planned]
    write_report(write_sweep(tmp_path, records))
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in map(str.strip, output.splitlines()) if line not in ("...", *printed)] == []


@pytest.mark.usefixtures("without_figures")
def test_prediction_report_starts_with_leader_and_memory(tmp_path, capsys):
    """All values come before any table, in this order."""
    times = {"ulysses": (80.0, 100.0, 125.0), "usp": (83.0, 104.0, 130.0), "ring": (96.0, 120.0, 150.0)}
    fast = [make_predicted(config={"strategy": name}, step_ms=step_ms) for name, step_ms in times.items()]
    long = [
        make_predicted(config={"strategy": name, "seq_len": 65536}, fit="out_of_memory") for name in times
    ]
    write_report(write_sweep(tmp_path, [*fast, *long]))
    page = re.sub("<style>.*?</style>|<[^>]+>", " ", (tmp_path / "report.html").read_text(), flags=re.DOTALL)
    for text in (capsys.readouterr().out, (tmp_path / "summary.md").read_text(), page):
        *parts, table = (
            "ulysses is predicted to be the fastest at 8k, without a clear lead",
            "8k, predicted: ulysses, 81,920 (65,536 to 102,400)",
            "no clear difference: usp; slower: ring by 16.7 %",
            "ring at 64k; ulysses at 64k; usp at 64k",
            "ulysses: 8k (64k runs out)",
            "rates of hardware=h100_80gb; nothing ran",
            "OOM (predicted)",
        )
        shown = " ".join(text.split())
        places = [shown.find(part) for part in parts]
        assert -1 not in places, parts[places.index(-1)]
        assert places == sorted(places)
        assert places[-1] < shown.index(table)


def test_page_of_predictions_splits_step_and_memory(told, records):
    shown = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", told["page"])
    parts = [text for name, text in shown if name == "predicted step, ms by part"]
    assert len(parts) == len(records)
    assert all("attention " in text for text in parts)
    assert [text for name, text in shown if name == "memory that one rank may take"] == ["79.1 GiB"] * 10
    verdicts = [text for name, text in shown if name == "predicted verdict on memory"]
    assert (verdicts.count("fits"), verdicts.count("out of memory")) == (8, 2)


def test_progress_line_of_a_prediction_has_its_band(records):
    assert re.fullmatch(r"[\d,]+ tokens/s predicted \([\d,]+ to [\d,]+\)", outcome(records[0]))


@pytest.mark.usefixtures("without_figures")
def test_section_on_predicted_measurements(tmp_path, capsys):
    measured = make_record(timing=make_timing([[100.0] * 8] * 2))
    records = [with_prediction(measured, step_ms=(80.0, 90.0, 110.0))]
    write_report(write_sweep(tmp_path, records))
    said = " ".join(capsys.readouterr().out.split())
    page, summary = (tmp_path / "report.html").read_text(), (tmp_path / "summary.md").read_text()
    line = "step time off by 10.0 % in the median of 1 cell"
    assert all(line in " ".join(text.split()) for text in (said, page, summary))
    assert "Predicted next to measured</h2>" in page
    header, *_ = (tmp_path / "summary.csv").read_text().splitlines()
    assert "step_time_error_share" in header.split(",")
