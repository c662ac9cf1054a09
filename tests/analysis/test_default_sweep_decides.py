"""The default sweep on four H100, simulated without running cells, ends decided."""

import io
import json
import random
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace
from rich.console import Console

from analysis.answers.verdict import verdict
from bench.common.environment import describe_environment
from bench.config import ExitCode
from bench.extras.predict.prediction import expected_by_cost_model
from bench.plan.estimate import Estimate
from bench.plan.plan import plan
from bench.run import sweep as sweep_run
from bench.run.progress import Progress
from tests.support.cells import FOUR_H100, raws_of
from tests.support.records import make_record, make_timing, read_lines

PROCESS_SPREAD = 0.01
"""Standard deviation of the speeds of a cell's processes."""


class Idle:
    """Launcher that runs nothing and, as if on other machines, takes no lease."""

    is_local = False

    def warm(self):
        pass


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Function that runs the default sweep with ring slower by a factor, and returns the records."""

    def sweep(ring_factor):
        estimate, noise = Estimate(expected_by_cost_model), random.Random(0)
        now = [datetime(2026, 1, 1, tzinfo=UTC)]

        def run_cell(planned, running, _):
            cell = planned.cell
            factor = ring_factor if cell.strategy == "ring_flash_attn" else 1.0
            step_ms = 6000 * cell.seq_len / 65536 * factor * noise.lognormvariate(0, PROCESS_SPREAD)
            ranks, wall_s = cell.cluster.world_size, estimate.cell_s(planned)
            record = make_record(
                config=cell.flat(),
                cell_id=cell.cell_id,
                repeat=planned.repeat,
                wall_s=wall_s,
                started_at=now[0].isoformat(),
                timing=make_timing([[step_ms] * 6] * ranks, cell.tokens_per_step),
                environment=replace(describe_environment({}), argv=["run_sweep.py", "seq_len=8k,64k,96k"]),
            )
            now[0] += timedelta(seconds=wall_s)
            with running.store.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            return True

        monkeypatch.setattr(sweep_run, "_run_cell", run_cell)
        raws = raws_of((), ("8k", "64k", "96k"), sweep_dir=str(tmp_path))
        planned = plan(raws, FOUR_H100, single=False, default_strategies=True)
        progress = Progress(Console(file=io.StringIO()), estimate=estimate)
        code = sweep_run.run_plan(planned, Idle(), progress, write_report=lambda _: True)
        assert code is ExitCode.OK
        return read_lines(tmp_path / "records.jsonl")

    return sweep


@pytest.mark.parametrize(
    ("ring_factor", "answer"),
    [
        (1.1, "deepspeed_ulysses is faster than ring_flash_attn at 8k and 96k."),
        (1.0, "deepspeed_ulysses and ring_flash_attn differ by less than 5 % at 8k and 96k."),
    ],
)
def test_default_sweep_decides_within_35_minutes(swept, cells_of, ring_factor, answer):
    records = swept(ring_factor)
    assert sum(record["wall_s"] for record in records) < 35 * 60
    found = verdict(cells_of(records), "go {}".format)
    assert found.answer == f"{answer} Comparisons are undecided at 64k (one process each)."
    assert "of the two fastest strategies. Run: go measure.repeats_budget_s=" in found.to_decide
