"""What a person is told of sweeps of predictions, and of measurements that were predicted."""

import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from analysis.report import write_report
from bench.cell.outcome import outcome
from bench.cell.planned import planned_cell
from bench.cell.run import run
from tests.analysis.predictions import with_prediction
from tests.analysis.records import make_record, make_timing, write_sweep
from tests.cells import TWO_CORES, make_cell

WORDS = ("mode=predict", "hardware=h100_80gb", "model=qwen3_4b", "cluster.world_size=4", "loss=untiled")
OF_SAMPLES = (
    "n=1", "one process", "processes of each cell", "95 % interval", "do not say what was checked",
    "passed every check", "would decide", "traced step by traced step",
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
    folder = write_sweep(tmp_path_factory.mktemp("sweep"), [record.to_json() for record in records])
    with redirect_stdout(StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.report.draw_figures", lambda *_: [])
        write_report(folder)
    names = {"md": "summary.md", "page": "report.html"}
    files = {name: (folder / file).read_text() for name, file in names.items()}
    return {"terminal": printed.getvalue()} | files


@pytest.mark.parametrize("where", ["terminal", "md", "page"])
def test_a_report_of_predictions_speaks_of_bands_and_of_no_sample_process_or_check(told, where):
    text = " ".join(told[where].split())
    assert not [words for words in OF_SAMPLES if words in text]
    assert "OOM (predicted)" in text
    assert "the band of the model, not a confidence interval" in text
    assert "No clear difference predicted: ring and ulysses at 8k, 16k, 32k and 64k." in text


def test_a_prediction_s_page_says_what_the_expected_step_and_memory_are_made_of(told, records):
    shown = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", told["page"])
    parts = [text for name, text in shown if name == "predicted step, ms by part"]
    assert len(parts) == len(records)
    assert all("attention " in text for text in parts)
    needs = [text for name, text in shown if name == "predicted need of one rank, and what it may take"]
    assert sum(text.endswith("of 79.1 GiB: fits") for text in needs) == 8
    assert sum(text.endswith("of 79.1 GiB: out of memory") for text in needs) == 2


def test_a_prediction_is_told_with_its_band_while_the_sweep_runs(records):
    assert re.fullmatch(r"[\d,]+ tokens/s predicted \([\d,]+ to [\d,]+\)", outcome(records[0]))


@pytest.mark.usefixtures("without_figures")
def test_measurements_that_were_predicted_have_a_section_of_their_own(tmp_path, capsys):
    measured = make_record(timing=make_timing([[100.0] * 8] * 2))
    records = [with_prediction(measured, step_ms=(80.0, 90.0, 110.0))]
    write_report(write_sweep(tmp_path, records))
    said = " ".join(capsys.readouterr().out.split())
    page, summary = (tmp_path / "report.html").read_text(), (tmp_path / "summary.md").read_text()
    line = "step time off by 10.0 %, 1 of 1 within the band"
    assert all(line in " ".join(text.split()) for text in (said, page, summary))
    assert "Predicted beside measured</h2>" in page
    header, *_ = (tmp_path / "summary.csv").read_text().splitlines()
    assert "step_time_error_share" in header.split(",")
