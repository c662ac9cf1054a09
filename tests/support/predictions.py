"""Records of cells that were predicted: real ones by arithmetic, and ones with bands of a test's own."""

from tests.support.records import FAILED, make_record, make_timing, make_trace

GIB = 2**30


def make_prediction(step_ms=(80.0, 100.0, 125.0), peak_gib=(1.8, 2.0, 2.2), fit="fits"):
    """What a record's `analytic` says of it, by low, expected and high ends."""
    peak = dict(zip(("low", "expected", "high"), (gib * GIB for gib in peak_gib), strict=True))
    return {
        "step_time_ms": dict(zip(("low", "expected", "high"), step_ms, strict=True)),
        "parts": {"attention_ms": step_ms[1] - 10, "optimizer_ms": 10.0, "idle_ms": 0.0},
        "peak_allocated_bytes": peak,
        "needed_bytes": {end: size + GIB for end, size in peak.items()},
        "memory": {"states": GIB, "loss": GIB // 2},
        "usable_bytes": 79 * GIB,
        "fit": fit,
    }


def with_prediction(record, **prediction):
    """A record that also says what was expected of its cell."""
    analytic = {"tokens_per_step": record["config"]["seq_len"], "prediction": make_prediction(**prediction)}
    return record | {"analytic": record["analytic"] | analytic}


def make_predicted(*, config=None, **prediction):
    """The record of a cell that never ran: one step of one rank, and out of memory where it does not fit."""
    tokens = {"mode": "predict"} | (config or {})
    record = make_record(config=tokens, provenance="predicted", checks=None, losses=None, parity=None)
    record = with_prediction(record, **prediction)
    found = record["analytic"]["prediction"]
    if found["fit"] == "out_of_memory":
        return record | FAILED | {"status": "out_of_memory", "reason": "needs more than it has"}
    step_ms = found["step_time_ms"]["expected"]
    return record | {
        "timing": make_timing([[step_ms]], record["config"]["seq_len"]),
        "memory": {"peak_allocated_bytes": [found["peak_allocated_bytes"]["expected"]]},
        "trace": make_trace(1, step_ms=[step_ms]),
        "engagement": None,
    }
