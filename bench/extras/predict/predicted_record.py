"""Record of a predicted cell: the prediction in the sections that a measurement would fill."""

from __future__ import annotations

from msgspec.structs import replace

from bench.common.environment import this_machine
from bench.common.labels import size_label
from bench.config import Cell
from bench.cost.band import Fit
from bench.extras.predict.hardware_file import hardware_of, has_rates
from bench.extras.predict.prediction import Prediction, predict
from bench.extras.predict.time import PredictedParts
from bench.measure import Sections
from bench.measure.memory.section import MemorySection
from bench.measure.timing.section import TimingSection
from bench.measure.trace.section import TracedStep, TraceSection
from bench.record.record import Record, Status
from bench.request.hardware import usable_bytes


def complete_predicted(cell: Cell, record: Record) -> Record:
    """Return the record of a legal cell with the prediction of one step on its slowest rank.

    A cell that needs more memory than a rank has gets the status out of memory and no sections.
    """
    prediction = prediction_of(cell)
    assert prediction is not None  # a cell without a prediction was refused
    record = replace(record, analytic=replace(record.analytic, prediction=prediction.as_record()))
    if prediction.fit is Fit.OUT_OF_MEMORY:
        assert prediction.usable_bytes is not None
        need, usable = round(prediction.needed_bytes.expected), prediction.usable_bytes
        reason = f"needs about {size_label(need)} per rank and has {size_label(usable)}"
        return replace(record, status=Status.OUT_OF_MEMORY, reason=reason)
    return replace(record, **sections_of(cell, prediction))


def prediction_of(cell: Cell) -> Prediction | None:
    """Return the prediction for a legal cell; None without formulas for it or rates of its hardware."""
    if not has_rates(cell.hardware):
        return None
    return predict(cell, hardware_of(cell.hardware), usable_bytes(cell, this_machine()))


def sections_of(cell: Cell, prediction: Prediction) -> Sections:
    """Return the sections of a record with the expected values of one rank and one step."""
    step_ms = prediction.step_time_ms.expected
    return {
        "timing": TimingSection(
            step_times_ms=[[step_ms]],
            window_ms=[step_ms],
            warmup="full",
            tokens_per_step=cell.tokens_per_step,
        ),
        "memory": MemorySection(peak_allocated_bytes=[round(prediction.peak_allocated_bytes.expected)]),
        "trace": _trace(prediction.parts),
    }


def _trace(parts: PredictedParts) -> TraceSection:
    """Return the parts as a trace section of one rank and one step, without waiting."""
    exposed_ms = {"attention": [parts.transfer_ms], "parameters": [parts.model_state_ms]}
    waiting_ms = {"attention": [0.0], "parameters": [0.0]}
    total_ms = {**exposed_ms, "attention": [parts.transfer_ms + parts.hidden_transfer_ms]}
    step = TracedStep(
        step_ms=[parts.step_ms],
        purpose_exposed_ms=exposed_ms,
        purpose_exposed_waiting_ms=waiting_ms,
    )
    return TraceSection(
        step_ms=[parts.step_ms],
        total_ms=[sum(times[0] for times in total_ms.values())],
        exposed_ms=[sum(times[0] for times in exposed_ms.values())],
        purpose_total_ms=total_ms,
        purpose_exposed_ms=exposed_ms,
        purpose_waiting_ms=waiting_ms,
        purpose_exposed_waiting_ms=waiting_ms,
        compute_ms={
            "attention": [parts.attention_ms],
            "packing": [parts.packing_ms],
            "optimizer": [parts.optimizer_ms],
            "other": [parts.other_compute_ms],
        },
        idle_ms=[parts.idle_ms],
        purposes_unknown=[None],
        steps=[step],
    )
