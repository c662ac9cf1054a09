"""Make records as plain dictionaries, in the shape of a line of records.jsonl."""

import hashlib
import json
from collections import Counter
from types import SimpleNamespace

from msgspec import convert, to_builtins

from analysis.read.archive import read_archive
from analysis.read.metrics import RECORD_METRICS
from analysis.read.results import Results
from bench.measure.check import Check
from bench.record.record import SCHEMA_VERSION, Record
from bench.record.store import line_of, read_records

CONFIG = {
    "seq_len": 8192,
    "batch": 1,
    "grad_accum": 1,
    "strategy": "ulysses",
    "layout": "contiguous",
    "kernel": "torch_flash",
    "dtype": "bf16",
    "model": "qwen3_nano",
    "model.num_layers": 1,
    "engine": "zero3",
    "trainer": "native",
    "workload": "train",
    "data": "text",
    "mode": "measure",
    "hardware": "h100_80gb",
    "cluster": "gpu",
    "cluster.world_size": 2,
    "cluster.device": "cuda",
    "sp_degree": 2,
    "dp_replicate": 1,
    "dp_shard": 1,
    "checkpointing": False,
    "loss": "chunked",
    "measure.steps": 8,
    "experiment": "none",
}
CPU = {"hardware": "cpu", "cluster": "cpu", "cluster.device": "cpu"}
SHARED_GPU = {"cluster.ranks_per_gpu": 2}
FAILED = {"timing": None, "memory": None, "trace": None, "losses": None, "engagement": None, "parity": None,
          "checks": None}  # fmt: skip
ATTENTION_CHECKED = to_builtins(Check(what="attention", against="float64", tokens=512))
TRAINING_COMPARED = to_builtins(
    Check(
        what="training signal",
        against="another cell",
        tokens=8192,
        steps=2,
        of_steps=2,
        compares_training=True,
    )
)


SECTIONS = {
    "parity": {"tokens": 512, "errors": {"out": 1e-3}, "limits": {"out": 2e-2}},
    "engagement": {
        "attention_name": "ulysses", "modules": [], "attention_shapes": [], "sent_bytes": {}, "calls": {},
    },
    "losses": {
        "loss": [5.5, 4.5], "grad_norm": [2.0, 1.0], "valid_tokens": [8192, 8192], "loss_sums": [],
        "tokens_digest": ["0", "1"], "expected_digest": ["0", "1"],
    },
    "telemetry": {
        "reason": None, "throttled": None, "sample_ms": None, "power_w": None, "sm_clock_mhz": None,
        "reference_clock_mhz": None, "utilisation": None, "clock_events": None, "other_processes": None,
        "load_average": 1.0, "involuntary_context_switches": [], "cpus": None,
    },
    "memory": {"peak_allocated_bytes": None},
    "full_length": {"tokens": 8192, "rows": 32, "errors": {}, "limits": {}},
    "failure": {"rank": None, "phase": None, "kind": "Error", "message": "", "log_tail": ""},
}  # fmt: skip
"""Fields of sections that a test does not set."""


ENVIRONMENT = {
    "gpus": [], "cores": None, "cpu": None, "memory_bytes": None, "gpu_memory_bytes": [],
    "gpu_capabilities": [],
    "device_name": None, "os": None, "python": None, "packages": {}, "git_commit": None, "git_dirty": None,
    "sources": None, "load_average": None, "argv": [], "inherited_env": {},
}  # fmt: skip


def whole(record):
    """Return the record as plain values, with every field that its sections must have."""
    record = to_builtins(record)
    filled = {name: fields | record[name] for name, fields in SECTIONS.items() if record.get(name)}
    if memory := filled.get("memory"):  # tests give fractions of GiB
        filled["memory"] = {name: _whole_bytes(sizes) for name, sizes in memory.items()}
    analytic = {"tokens_per_step": record["config"].get("seq_len", 8192)} | (record.get("analytic") or {})
    environment = ENVIRONMENT | (record.get("environment") or {})
    return record | filled | {"analytic": analytic, "environment": environment}


def _whole_bytes(sizes):
    return [*map(int, sizes)] if isinstance(sizes, list) and isinstance(sizes[0], float) else sizes


def as_record(record):
    """Return a dictionary as a Record."""
    return convert(whole(record), Record)


def as_line(record):
    """Return a Record as plain dictionaries, in the shape of its line."""
    return json.loads(line_of(record))


def read_lines(path):
    """Return the lines of a file as plain dictionaries, after a check that the store can read them."""
    read_records(path)
    return [json.loads(line) for line in path.read_bytes().splitlines() if line]


def make_record(*, config=None, **overrides):
    """Return the record of a cell with two ranks and eight steps of 100 ms; any part can be replaced."""
    settings = CONFIG | (config or {})
    if settings["strategy"] == "local":
        settings |= {"sp_degree": 1, "cluster.world_size": 1} | (config or {})
    identity = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    ranks = settings["cluster.world_size"]
    record = {
        "schema_version": SCHEMA_VERSION,
        "cell_id": identity,
        "experiment": "none",
        "role": "cell",
        "repeat": 0,
        "order": 0,
        "status": "ok",
        "reason": None,
        "provenance": "measured",
        "config": settings,
        "environment": {"device_name": "NVIDIA H100 80GB HBM3", "packages": {"torch": "2.13.0"}},
        "analytic": {"model_flops_causal": 10**12, "hardware_flops_causal": 2 * 10**12},
        "started_at": "2026-01-01T00:00:00+00:00",
        "wall_s": 3.0,
        "fixed_cost_s": 1.5,
        "parity": SECTIONS["parity"],
        "engagement": {
            "modules": ["bench.strategies.ulysses.attention"],
            "attention_shapes": [[[settings["seq_len"] // ranks, 4, 2]]] * ranks,
            "sent_bytes": {"attention": [1024] * ranks},
        },
        "timing": make_timing([[100.0] * 8] * ranks, settings["seq_len"]),
        "losses": SECTIONS["losses"],
        "memory": {
            "peak_allocated_bytes": [2 * 1024**3] * ranks,
            "peak_resident_bytes": [500] * ranks,
            "base_resident_bytes": [300] * ranks,
        },
        "trace": make_trace(ranks),
        "failure": None,
        "checks": [ATTENTION_CHECKED, TRAINING_COMPARED],
    }
    return whole(record | overrides)


def make_trace(ranks, attention_ms=60.0, **overrides):
    """Return a trace of a 110 ms step with equal ranks: a fifth is communication, half of it exposed."""
    per_rank = {"attention": attention_ms, "packing": 4.0, "optimizer": 10.0, "other": 79.0 - attention_ms}
    exposed = {"attention": 7.0, "parameters": 2.0, "gradients": 1.0, "data_and_loss": 1.0}
    trace = {
        "step_ms": [110.0] * ranks,
        "total_ms": [22.0] * ranks,
        "exposed_ms": [11.0] * ranks,
        "communication_ms": {"all_to_all": [22.0] * ranks},
        "calls": {"all_to_all": [4] * ranks},
        "purpose_total_ms": {"attention": [14.0] * ranks, "parameters": [8.0] * ranks},
        "purpose_exposed_ms": {purpose: [ms] * ranks for purpose, ms in exposed.items()},
        "purpose_waiting_ms": {"attention": [5.0] * ranks},
        "purpose_exposed_waiting_ms": {"attention": [3.0] * ranks},
        "compute_ms": {part: [ms] * ranks for part, ms in per_rank.items()},
        "idle_ms": [6.0] * ranks,
        "causal_area": [1000] * ranks,
        "purposes_unknown": [None] * ranks,
    } | overrides
    step = {name: trace[name] for name in ("step_ms", "purpose_exposed_ms", "purpose_exposed_waiting_ms")}
    known = step | {"purpose_exposed_ms": step["purpose_exposed_ms"] or {}}
    return {"steps": [known]} | trace


def make_step(step_ms, exposed_ms=None, waiting_ms=None):
    """Return one of several traced steps, by default with 7 ms of exposed attention, 3 of them waiting."""
    return {
        "step_ms": step_ms,
        "purpose_exposed_ms": {"attention": exposed_ms or [7.0] * len(step_ms)},
        "purpose_exposed_waiting_ms": {"attention": waiting_ms or [3.0] * len(step_ms)},
    }


def make_timing(step_times_ms, tokens_per_step=8192):
    return {
        "step_times_ms": step_times_ms,
        "window_ms": [sum(steps) for steps in step_times_ms],
        "warmup": "full",
        "tokens_per_step": tokens_per_step,
    }


def make_failure(status, reason, log_tail="", **overrides):
    """Return the record of a failed cell, which has no section."""
    failure = {"rank": 1, "phase": "timing", "kind": "Error", "message": reason, "log_tail": log_tail}
    return make_record(**FAILED | {"status": status, "reason": reason, "failure": failure} | overrides)


def grid(strategies, lengths, **overrides):
    """Return one successful record per strategy and length."""
    return [
        make_record(config={"strategy": strategy, "seq_len": length}, **overrides)
        for strategy in strategies
        for length in lengths
    ]


def on_ranks(strategies, lengths, ranks, step_ms=lambda length, count: length / 80 / count, **config):
    """Return one successful record per strategy, length and number of ranks, all in one sequence group."""
    return [
        make_record(
            config={"strategy": strategy, "seq_len": length, "cluster.world_size": count, "sp_degree": count}
            | config,
            timing=make_timing([[step_ms(length, count)] * 8] * count, length),
        )
        for strategy in strategies
        for length in lengths
        for count in ranks
    ]


def write_sweep(folder, records):
    """Write a sweep's folder with these records."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(whole(record)) + "\n" for record in records)
    (folder / "records.jsonl").write_text(lines)
    return folder


def with_attention_calls(record, **calls):
    """Return the record with a section of 3 attention calls on 2 ranks, which take 4 + 8 ms on one device."""
    section = {
        "forward_ms": [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0]],
        "backward_ms": [[3.0, 3.0, 3.0], [4.0, 2.0, 4.0]],
        "one_device_forward_ms": [4.0],
        "one_device_backward_ms": [8.0],
        "one_device_reason": None,
        "error_rows": 32,
        "error_ulps": {"out": 1.5, "dq": 3.0},
        "control_error_ulps": {"out": 1.0, "dq": 2.0},
    }
    flops = {"attention_forward_flops": 2 * 10**9, "attention_backward_flops": 5 * 10**9}
    return record | {"attention": section | calls, "analytic": record["analytic"] | flops}


PEAKS = {"h100_80gb": 1e15}


def metrics_of(record, peaks=PEAKS):
    """Return the record's metrics by name; None for a metric that it does not have."""
    results = Results(as_record(record), peaks)
    return SimpleNamespace(**{metric.name: metric.from_record(results) for metric in RECORD_METRICS})


def frame_of_records(folder, records, peaks=PEAKS):
    """Return the frame of records as read from sweeps; a repeat that occurs again is in another sweep."""
    counts, sweeps = Counter(), {}
    for record in records:
        key = (record["cell_id"], record["repeat"])
        sweeps.setdefault(counts[key], []).append(record)
        counts[key] += 1
    folders = [write_sweep(folder / str(number), lines) for number, lines in (sweeps or {0: []}).items()]
    return read_archive(folders, peaks).frame


GIB = 2**30


def make_prediction(step_ms=(80.0, 100.0, 125.0), peak_gib=(1.8, 2.0, 2.2), fit="fits"):
    """Return the fields of `analytic` for a prediction with these low, expected and high ends."""
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
    """Return the record with a prediction of its cell."""
    analytic = {"tokens_per_step": record["config"]["seq_len"], "prediction": make_prediction(**prediction)}
    return record | {"analytic": record["analytic"] | analytic}


def make_predicted(*, config=None, **prediction):
    """Return the record of a predicted cell: one step of one rank, or out of memory if it does not fit."""
    tokens = {"mode": "predict"} | (config or {})
    record = make_record(config=tokens, provenance="predicted", checks=None, losses=None, parity=None)
    record = with_prediction(record, **prediction)
    predicted = record["analytic"]["prediction"]
    if predicted["fit"] == "out_of_memory":
        return record | FAILED | {"status": "out_of_memory", "reason": "needs more than it has"}
    step_ms = predicted["step_time_ms"]["expected"]
    return record | {
        "timing": make_timing([[step_ms]], record["config"]["seq_len"]),
        "memory": {"peak_allocated_bytes": [predicted["peak_allocated_bytes"]["expected"]]},
        "trace": make_trace(1, step_ms=[step_ms]),
        "engagement": None,
    }


def matches_of(record):
    """Yield the comparisons of a record with another cell, each with the name of its field or section."""
    for name, section in record.sections.items():
        for field in () if section is None else section.__struct_fields__:
            match = getattr(section, field)
            if hasattr(match, "is_within"):
                yield name if field == "match" else field, match
