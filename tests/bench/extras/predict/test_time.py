"""Predicted parts of a step: a link carries one message at a time; comparison with a measured GPU."""

import json

import pytest

from bench.common.environment import REPOSITORY
from bench.config import Cell
from bench.cost.band import BandEnd
from bench.extras.predict.hardware_file import hardware_of
from bench.extras.predict.prediction import predict
from bench.extras.predict.speeds import Speeds
from bench.extras.predict.time import step_parts, step_work
from tests.support.cells import make_cell


@pytest.mark.parametrize(("hardware", "length"), [("h100_80gb", "64k"), ("l20", "8k")])
@pytest.mark.parametrize("strategy", ["ring", "gather_kv", "ulysses"])
def test_hidden_communication_takes_no_longer_than_compute(hardware, length, strategy):
    """The sum of attention's and the engine's hidden communication is limited."""
    cell = make_cell(
        "mode=predict", f"hardware={hardware}", "cluster.world_size=8", "model=qwen3_4b",
        f"strategy={strategy}", f"seq_len={length}",
    )  # fmt: skip
    work, speeds = step_work(cell), Speeds(hardware_of(hardware), BandEnd.EXPECTED)
    parts = step_parts(cell, work, speeds)
    state_s = sum(message.count * speeds.communication_s(message.communication) for message in work.messages)
    hidden_ms = parts.hidden_transfer_ms + 1e3 * state_s - parts.model_state_ms
    assert 0 < hidden_ms <= (parts.attention_ms + parts.other_compute_ms) * (1 + 1e-9)


def test_prediction_matches_the_steps_measured_on_an_h100(monkeypatch):
    """The step waits for the host at 8k and for attention at 32k."""
    # These ranks reduced gradients in a bucket of hidden_size^2 numbers, not of DeepSpeed's default.
    monkeypatch.setattr("bench.training.engines.zero3.facts.REDUCE_BUCKET", 1024**2)
    lines = (REPOSITORY / "results/reference/h100/one_gpu/records.jsonl").read_text().splitlines()
    for record in (record for record in map(json.loads, lines) if record["status"] == "ok"):
        predicted = predict(Cell.from_flat(record["config"]), hardware_of("h100_80gb"), None)
        steps_ms = sorted(record["timing"]["step_times_ms"][0])
        assert predicted.step_time_ms.expected == pytest.approx(steps_ms[len(steps_ms) // 2], rel=0.05)
        compute_ms, (peak_bytes,) = record["trace"]["compute_ms"], record["memory"]["peak_allocated_bytes"]
        assert predicted.parts.optimizer_ms == pytest.approx(compute_ms["optimizer"][0], rel=0.05)
        assert predicted.parts.other_compute_ms == pytest.approx(compute_ms["other"][0], rel=0.05)
        assert predicted.peak_allocated_bytes.expected == pytest.approx(peak_bytes, rel=0.01)
