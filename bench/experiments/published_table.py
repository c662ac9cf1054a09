"""What the post on Ulysses printed beside what was measured or predicted: Markdown in the sweep's folder."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.config import ModelConfig
from bench.cost.band import Band
from bench.cost.fit import fit_of
from bench.cost.memory_band import CONTEXT_GIB
from bench.cost.weights import parameters
from bench.experiments.published import HARDWARE, MODEL, OUT_OF_MEMORY, PEAK_GIB, POST, RANKS, REVISIONS
from bench.labels import GIB, LENGTH_UNITS, length_label
from bench.request.hardware import hardware_of

Line = Mapping[str, Any]
MEMORY_FILE, THROUGHPUT_FILE = "published_memory.md", "published_throughput.md"
SPAN = 32 * LENGTH_UNITS["k"]
"""Tokens that slopes are told for."""
FITTED = "fitted to the published line"
STATE_BYTES = {False: 16, True: 2}
"""Of a parameter with the optimizer on the GPU, and with it on the CPU: bf16 weights, gradients, Adam in
float32 (arXiv:1910.02054, section 3.1)."""
NAMED = ("length", "ranks", "trainer")
PLACES = {False: "device", True: "host"}
POST_PLACES = {False: "GPU", True: "CPU"}


WHAT_IT_BEARS = (
    (
        "- The last two columns are revision B as a share of the GPUs' peak, by the model's FLOPs without"
        " recomputation; above 100 % it cannot be the rate of each GPU."
    ),
    "- The base is one GPU: equal tokens/s on 4 GPUs are a quarter of its efficiency.",
    (
        "- The revisions differ by 1.7 times at 8k on 4 GPUs. Revision B's 3.7x is 64k against the base at"
        " 8k, whose share of the peak is less than half of that: a fixed cost, spread over more tokens."
    ),
)


def loss_moment_bytes(model: ModelConfig, *, ranks: int, seq_len: int, on_cpu: bool) -> float:
    """Bytes of tensors at the loss, of one of `ranks` that share a sequence: 16 N/P + 2 V h + 2 L h S/P
    + 12 V S/P + 8 h S/P.

    States, the head, the layers' inputs, three float32 tensors of logits and the last norm, with ZeRO-3,
    checkpointing and bf16; nothing in it is fitted.
    """
    hidden, vocab, rows = model.hidden_size, model.vocab_size, seq_len / ranks
    head = 2 * vocab * hidden if ranks > 1 else 0  # one rank gathers nothing
    inputs = 2 * model.num_layers * hidden * rows
    return STATE_BYTES[on_cpu] * parameters(model) / ranks + head + inputs + (12 * vocab + 8 * hidden) * rows


def line_slope(points: Mapping[int, float]) -> float:
    """Least squares over lengths, per SPAN tokens."""
    return float(statistics.linear_regression([*points], [*points.values()]).slope * SPAN)


def published_line() -> dict[int, float]:
    """GiB by length of the cells that share a sequence."""
    return {length: peak for (ranks, length), peak in PEAK_GIB.items() if ranks == RANKS}


def fitted_gib(model: ModelConfig, *, on_cpu: bool) -> float:
    """The constant that brings the loss moment closest to the published line, in GiB: their mean distance."""
    return statistics.fmean(_distances(model, published_line(), on_cpu=on_cpu))


def _distances(model: ModelConfig, line: Mapping[int, float], *, on_cpu: bool) -> list[float]:
    return [
        peak - loss_moment_bytes(model, ranks=RANKS, seq_len=length, on_cpu=on_cpu) / GIB
        for length, peak in line.items()
    ]


def write_published_memory(records: Sequence[Line], folder: Path) -> None:
    """Write published_memory.md into the folder, and print it; `records` are the lines of the sweep."""
    _write(memory_text(records), folder / MEMORY_FILE)


def write_published_throughput(records: Sequence[Line], folder: Path) -> None:
    """Write published_throughput.md into the folder, and print it; `records` are the lines of the sweep."""
    _write(throughput_text(records), folder / THROUGHPUT_FILE)


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
    print(text)
    print(f"table: {path}")


def memory_text(records: Sequence[Line]) -> str:
    """Peaks by length and place of the optimizer, then what the published line says of them."""
    heads = (
        *NAMED, "optimizer on", "provenance", "tensors, GiB", "needed, GiB", "verdict", "published, GiB",
    )  # fmt: skip
    lines = [
        "# Published memory",
        "",
        f"Beside {POST}. One rank's peak.",
        "",
        *_table(heads, map(_memory_row, records)),
    ]
    if _is_post(records):
        lines += ["", *_line_said(_model_of(records))]
    return "\n".join([*lines, *_slopes_said(records), *_reasons(records)]).rstrip() + "\n"


def _memory_row(record: Line) -> tuple[str, ...]:
    config = record["config"]
    prediction = record["analytic"].get("prediction") or {}
    return (
        *_named(config),
        PLACES[config["offload.optimizer"]],
        str(record["provenance"]),
        _peak(record),
        _band(prediction.get("needed_bytes")),
        _verdict(record),
        _published(config),
    )


def _named(config: Line) -> tuple[str, str, str]:
    return length_label(config["seq_len"]), str(config["cluster.world_size"]), str(config["trainer"])


def _peak(record: Line) -> str:
    if record["provenance"] == "predicted":
        return _band((record["analytic"].get("prediction") or {}).get("peak_allocated_bytes"))
    peak = _measured_bytes(record)
    return "" if peak is None else f"{peak / GIB:.4g}"


def _measured_bytes(record: Line) -> int | None:
    memory = record.get("memory")
    return None if memory is None else max(memory["peak_allocated_bytes"])


def _verdict(record: Line) -> str:
    """What ran is known; what did not, is as the prediction has it."""
    if record["provenance"] != "predicted":
        return str(record["status"])
    return str((record["analytic"].get("prediction") or {}).get("fit") or record["status"])


def _published(config: Line) -> str:
    if config["model"] != MODEL:
        return ""
    point = (config["cluster.world_size"], config["seq_len"])
    return "out of memory" if point == OUT_OF_MEMORY else f"{PEAK_GIB[point]}" if point in PEAK_GIB else ""


def _band(band: Mapping[str, float] | None) -> str:
    if band is None:
        return ""
    low, expected, high = (band[end] / GIB for end in ("low", "expected", "high"))
    return f"{expected:.1f} ({low:.1f} to {high:.1f})"


def _is_post(records: Sequence[Line]) -> bool:
    """Whether these are the post's model on its number of ranks."""
    asked = {(r["config"]["model"], r["config"]["cluster.world_size"]) for r in records}
    return (MODEL, RANKS) in asked


def _model_of(records: Sequence[Line]) -> ModelConfig:
    config = records[0]["config"]
    values = {f.name: config.get(f"model.{f.name}", config["model"]) for f in fields(ModelConfig)}
    return ModelConfig(**values)


def _line_said(model: ModelConfig) -> Iterator[str]:
    """What the published line says by itself, whatever was measured here."""
    line = published_line()
    formula = {n: loss_moment_bytes(model, ranks=RANKS, seq_len=n, on_cpu=False) / GIB for n in line}
    slope, own = line_slope(line), line_slope(formula)
    yield (
        f"- Slope, GiB per 32k tokens of the sequence: published {slope:.2f}, formula {own:.2f}"
        f" ({own / slope - 1:+.1%}; nothing fitted)."
    )
    yield from _places_said(model)
    yield from _limit_said(model)


def _places_said(model: ModelConfig) -> Iterator[str]:
    """Which place of the optimizer the line fits: the slope is the same, the level tells."""
    base, alone = PEAK_GIB[1, 8192], 0.0
    for on_cpu, place in POST_PLACES.items():
        distances = _distances(model, published_line(), on_cpu=on_cpu)
        alone = base - loss_moment_bytes(model, ranks=1, seq_len=8192, on_cpu=on_cpu) / GIB
        yield (
            f"- Optimizer on the {place}: the line lies {min(distances):.2f} to {max(distances):.2f} GiB"
            f" above the formula, the base of 1 GPU {alone:.2f} GiB."
        )
    yield (
        "- The line fits the optimizer on the GPU; on the CPU, as the post says, its 1-GPU base would have to"
        f" hold {alone:.0f} GiB that nothing explains."
    )


def _limit_said(model: ModelConfig) -> Iterator[str]:
    """Of the length that ran out of memory and the one before it: with the fitted constant."""
    usable, constant = hardware_of(HARDWARE).usable_bytes, fitted_gib(model, on_cpu=False)
    distances = _distances(model, published_line(), on_cpu=False)
    yield (
        f"- Constant {FITTED}: {constant:.2f} GiB ({min(distances):.2f} to {max(distances):.2f}). It is not"
        " identified, and that it meets the line counts for nothing; context and libraries take"
        f" {CONTEXT_GIB[0]} to {CONTEXT_GIB[1]} GiB, and weights that ZeRO-3 keeps gathered up to 2 GB."
    )
    for length in (98304, OUT_OF_MEMORY[1]):
        tensors = loss_moment_bytes(model, ranks=RANKS, seq_len=length, on_cpu=False)
        low, high = (tensors + distance * GIB for distance in (min(distances), max(distances)))
        verdict = fit_of(Band(low, tensors + constant * GIB, high), usable)
        yield (
            f"- {length_label(length)} with the constant {FITTED}: {tensors / GIB + constant:.1f} GiB of"
            f" {usable / GIB:.1f}, {verdict.value}."
        )


def _slopes_said(records: Sequence[Line]) -> Iterator[str]:
    """Measured peaks of each kind of cell beside the formula's, where there are two lengths."""
    kinds: dict[tuple[Any, ...], dict[int, tuple[float, float]]] = {}
    for record in records:
        peak, config = _measured_bytes(record), record["config"]
        if record["provenance"] == "measured" and peak is not None and config["cluster.world_size"] > 1:
            kind = (config["trainer"], config["offload.optimizer"])
            needed = record["analytic"]["needed_bytes"]
            kinds.setdefault(kind, {})[config["seq_len"]] = (peak / GIB, needed / GIB)
    for (trainer, on_cpu), points in kinds.items():
        if len(points) > 1:
            measured, formula = (line_slope({n: pair[i] for n, pair in points.items()}) for i in (0, 1))
            yield (
                f"- Measured slope, {trainer}, optimizer on the {PLACES[on_cpu]}: {measured:.4g} GiB per 32k"
                f" tokens; the formula's {formula:.4g} ({formula / measured - 1:+.1%})."
            )


def throughput_text(records: Sequence[Line]) -> str:
    """Tokens per second of the job and of each GPU, beside both revisions of the post."""
    heads = (
        *NAMED, "provenance", "tokens/s", "tokens/s per GPU", "to the base", "published A", "published B",
        "if published is of all GPUs", "if it is per GPU",
    )  # fmt: skip
    base = next((_rate(r) for r in records if r["config"]["cluster.world_size"] == 1 and _rate(r)), None)
    commits = ", ".join(f"{name} {each.commit}" for name, each in REVISIONS.items())
    rows = [_throughput_row(record, base) for record in records]
    table = _table(heads, rows)
    post = WHAT_IT_BEARS if _is_post(records) else []
    title = ["# Published throughput", "", f"Beside {POST}, revisions {commits}.", ""]
    return "\n".join([*title, *table, "", *post, *_reasons(records)]).rstrip() + "\n"


def _rate(record: Line) -> float | None:
    timing = record.get("timing")
    if timing is None or record["status"] != "ok":
        return None
    slowest_ms = [max(step) for step in zip(*timing["step_times_ms"], strict=True)]
    return float(timing["tokens_per_step"] / statistics.median(slowest_ms) * 1e3)


def _throughput_row(record: Line, base: float | None) -> tuple[str, ...]:
    config, rate = record["config"], _rate(record)
    ranks, point = config["cluster.world_size"], (config["cluster.world_size"], config["seq_len"])
    own = [""] * 3 if rate is None else [
        f"{rate:,.0f}", f"{rate / ranks:,.0f}", f"{rate / base:.2f}x" if base else ""
    ]  # fmt: skip
    said = [each.tokens_per_s.get(point) if config["model"] == MODEL else None for each in REVISIONS.values()]
    published = [f"{number:,}" if number else "" for number in said]
    return (*_named(config), str(record["provenance"]), *own, *published, *_shares(record, said[-1]))


def _shares(record: Line, published: float | None) -> tuple[str, str]:
    """The published rate as a share of H100s' peak, as the rate of all GPUs and of each."""
    if published is None:
        return "", ""
    analytic = record["analytic"]
    flops = analytic["model_flops_causal"] / analytic["tokens_per_step"] * published
    each = flops / hardware_of(HARDWARE).peak_flops_per_s
    return f"{each / record['config']['cluster.world_size']:.0%}", f"{each:.0%}"


def _table(heads: Sequence[str], rows: Any) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _reasons(records: Sequence[Line]) -> Iterator[str]:
    for record in records:
        if record["reason"] is not None:
            config = record["config"]
            named = f"{config['strategy']} {length_label(config['seq_len'])} {config['trainer']}"
            yield f"- {named}: {record['status']}: {record['reason']}"
