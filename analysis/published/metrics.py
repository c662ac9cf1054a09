"""Per metric of a claim: what the cost model and what a record says of it, in the claim's unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from analysis.labels import number_label
from analysis.published.choices import Words
from analysis.published.model import CostModel
from analysis.published.opinion import Verdict
from analysis.published.registry import Claim
from bench.cost.band import Band, End
from bench.cost.flops import CausalPairs, attention_forward_flops, model_flops
from bench.cost.operations import BACKWARD_PRODUCTS, FORWARD_PRODUCTS
from bench.labels import GIB

SPEED_TOLERANCE = 0.10
"""Two runs of one set-up by different people: other drivers, clocks, data."""
MEMORY_TOLERANCE = 0.05
RATIO_TOLERANCE = 0.10
EXACT_TOLERANCE = 0.01
LEAST_MEMORY_SHARE = 0.035
"""Of a predicted peak: the formula was so far from fake tensors of full models where it was furthest. A
prediction with a wider band of its own keeps it."""
FURTHER = 1.5
"""A longest length is refuted from above where a length this many times as long fits for certain."""


@dataclass(frozen=True, slots=True)
class Question:
    """One claim's cell, and whom to ask."""

    claim: Claim
    settings: Words
    base: Words | None
    """The cell that a ratio is taken to."""
    model: CostModel


Figure = Callable[[Question], Band | None]
"""The band of a claim's number; None where its set-up does not say enough."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the records' frame in a claim's unit."""

    name: str
    per: Callable[[float], float]
    also: tuple[str, ...] = ()
    """Other columns that the source may mean: the measured value lies between them all."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One kind of published number."""

    unit: str
    tolerance: float = RATIO_TOLERANCE
    """How far a measurement may lie off and still repeat it, and a claim from a band's edge be undecided."""
    figure: Figure | None = None
    column: Column | None = None
    """None where no single record holds it."""
    why_not: str = "no arithmetic gives it"
    """Where there is no figure."""
    beyond: tuple[Verdict, Verdict] = (Verdict.CONTRADICTED, Verdict.CONTRADICTED)
    """Verdicts on measurements far below and far above the claim."""


RATE = (Verdict.SLOWER, Verdict.FASTER)
TIME = (Verdict.FASTER, Verdict.SLOWER)
SIZE = (Verdict.LESS_MEMORY, Verdict.MORE_MEMORY)


def _ratio(value: Callable[[End], float], share: float) -> Band:
    """Both cells at the same end of the rates, as they ran on one device; what else differs is this share."""
    return _widened(Band.of(value), share)


def _widened(band: Band, share: float) -> Band:
    return Band(band.low / (1 + share), band.expected, band.high * (1 + share))


def _at_least(band: Band, share: float) -> Band:
    """The band, or so much on both sides of what is expected."""
    least = _widened(Band(band.expected, band.expected, band.expected), share)
    return Band(min(band.low, least.low), band.expected, max(band.high, least.high))


def _tokens_per_s(asked: Question, settings: Words, end: End) -> float:
    tokens = asked.model.cell(settings).tokens_per_step
    return 1e3 * tokens / asked.model.prediction(settings).step_time_ms.at(end)


def _throughput(asked: Question) -> Band:
    return Band.of(lambda end: _tokens_per_s(asked, asked.settings, end))


def _throughput_per_gpu(asked: Question) -> Band:
    ranks = asked.model.cell(asked.settings).cluster.world_size
    return Band.of(lambda end: _tokens_per_s(asked, asked.settings, end) / ranks)


def _step_time(asked: Question) -> Band:
    time_ms = asked.model.prediction(asked.settings).step_time_ms
    return Band.of(lambda end: time_ms.at(end) / 1e3)


def _speedup(asked: Question) -> Band | None:
    base = asked.base
    if base is None:
        return None
    return _ratio(
        lambda end: _tokens_per_s(asked, asked.settings, end) / _tokens_per_s(asked, base, end),
        RATIO_TOLERANCE,
    )


def _peak(asked: Question, settings: Words) -> Band:
    """From tensors alone to all that the process holds: a publication seldom says which it counts."""
    found = asked.model.prediction(settings)
    tensors = _at_least(found.peak_allocated_bytes, LEAST_MEMORY_SHARE)
    process = _at_least(found.needed_bytes, LEAST_MEMORY_SHARE)
    return Band(tensors.low / GIB, process.expected / GIB, process.high / GIB)


def _memory(asked: Question) -> Band:
    return _peak(asked, asked.settings)


def _memory_ratio(asked: Question) -> Band | None:
    if asked.base is None:
        return None
    base, own = _peak(asked, asked.base), _peak(asked, asked.settings)
    return _ratio(lambda end: base.at(end) / own.at(end), MEMORY_TOLERANCE)


def _intermediates_reduction(asked: Question) -> Band | None:
    """Of what one call of attention takes in forward, beyond what it keeps for backward."""
    if asked.base is None:
        return None
    own, base = (asked.model.call_memory(settings) for settings in (asked.settings, asked.base))
    percent = 100 * (1 - (own.forward - own.kept) / (base.forward - base.kept))
    return Band(percent, percent, percent)


def _iterations(asked: Question) -> Band | None:
    passes = str(asked.claim.software.get("passes"))
    return Band.of(lambda end: 1 / asked.model.attention_s(asked.settings, end)[passes])


def _of_ideal(asked: Question) -> Band:
    """One device's attention over a rank's share of the length, times ranks, over what all ranks take."""
    cell = asked.model.cell(asked.settings)
    alone = {
        **asked.settings,
        "strategy": "local",
        "layout": "auto",
        "cluster.world_size": 1,
        "sp_degree": 1,
        "seq_len": cell.shard_len,
    }
    passes = str(asked.claim.software.get("passes"))

    def percent(end: End) -> float:
        ideal_s = asked.model.attention_s(alone, end)[passes] * cell.sp_degree
        return 100 * ideal_s / asked.model.attention_s(asked.settings, end)[passes]

    return _ratio(percent, RATIO_TOLERANCE)


PRODUCTS: Mapping[str, float] = {
    "fwd": 1.0,
    "bwd": BACKWARD_PRODUCTS / FORWARD_PRODUCTS,
    "fwd+bwd": 1 + BACKWARD_PRODUCTS / FORWARD_PRODUCTS,
}
"""Work of a pass in units of the forward one."""


def _tflops(asked: Question) -> Band:
    """Of one device, in training without what is computed twice."""
    cell = asked.model.cell(asked.settings)
    ranks = cell.cluster.world_size
    if cell.workload.name == "train":
        flops = model_flops(cell, causal=True) / ranks
        return Band.of(lambda end: flops / _step_s(asked, end) / 1e12)
    passes = str(asked.claim.software.get("passes"))
    forward = attention_forward_flops(cell, causal=True, pairs=CausalPairs.of(cell)) / ranks
    return Band.of(
        lambda end: forward * PRODUCTS[passes] / asked.model.attention_s(asked.settings, end)[passes] / 1e12
    )


def _step_s(asked: Question, end: End) -> float:
    return asked.model.prediction(asked.settings).step_time_ms.at(end) / 1e3


def _mfu(asked: Question) -> Band:
    peak_tflops = asked.model.peak_flops_per_s(asked.settings) / 1e12
    found = _tflops(asked)
    return Band.of(lambda end: found.at(end) / peak_tflops)


def _forward_bytes(asked: Question) -> Band:
    """In units of N h / P elements, h being the size of all query heads."""
    cell = asked.model.cell(asked.settings)
    unit = 2 * cell.seq_len * cell.model.num_heads * cell.model.head_dim / cell.sp_degree
    sent = asked.model.schedule(asked.settings).forward_bytes / unit
    return Band(sent, sent, sent)


def _forward_bytes_ratio(asked: Question) -> Band | None:
    if asked.base is None:
        return None
    ratio = (
        asked.model.schedule(asked.settings).forward_bytes / asked.model.schedule(asked.base).forward_bytes
    )
    return Band(ratio, ratio, ratio)


@dataclass(frozen=True, slots=True)
class Room:
    """What a rank needs beside what it may take, in bytes."""

    need: Band
    usable: int

    @property
    def runs_out(self) -> bool | None:
        """None where the one lies within the band of the other."""
        if self.need.low <= self.usable < self.need.high:
            return None
        return self.need.low > self.usable

    @property
    def distance(self) -> float:
        """The factor between them, 1 where it is open."""
        return max(1.0, self.need.low / self.usable, self.usable / self.need.high)

    def __str__(self) -> str:
        low, high = (number_label(size / GIB) for size in (self.need.low, self.need.high))
        need = low if low == high else f"{low} to {high}"
        return f"needs {need} of {number_label(self.usable / GIB)} GiB by the model"


def room(asked: Question, times: float = 1.0) -> Room | None:
    """That of the claim's cell at so many times its length; None where nothing says what a rank may take."""
    length = round(asked.model.cell(asked.settings).seq_len * times)
    need, usable = asked.model.memory({**asked.settings, "seq_len": length})
    return None if usable is None else Room(_at_least(need, LEAST_MEMORY_SHARE), usable)


def _same(value: float) -> float:
    return value


LOSSES = "no arithmetic predicts a loss"
OTHERS = "it sums up other claims, or compares what is not here"

METRIC_TABLE: Mapping[str, Metric] = {
    "tokens_per_s": Metric(
        "tokens/s", SPEED_TOLERANCE, _throughput, Column("tokens_per_s", _same), beyond=RATE
    ),
    "tokens_per_s_per_gpu": Metric(
        "tokens/s of a GPU",
        SPEED_TOLERANCE,
        _throughput_per_gpu,
        Column("tokens_per_s_per_rank", _same),
        beyond=RATE,
    ),
    "step_time_s": Metric(
        "s", SPEED_TOLERANCE, _step_time, Column("step_time_ms", lambda ms: ms / 1e3), beyond=TIME
    ),
    "peak_mem_gb": Metric(
        "GiB",
        MEMORY_TOLERANCE,
        _memory,
        Column("peak_allocated_bytes", lambda size: size / GIB, also=("device_used_bytes",)),
        beyond=SIZE,
    ),
    "speedup": Metric("x", RATIO_TOLERANCE, _speedup, why_not="the cell that it is a ratio to is not stated"),
    "peak_mem_ratio": Metric(
        "x", RATIO_TOLERANCE, _memory_ratio, why_not="the cell that it is a ratio to is not stated"
    ),
    "iters_per_s": Metric("iterations/s", SPEED_TOLERANCE, _iterations),
    "pct_of_ideal_flash_attn": Metric(
        "%", SPEED_TOLERANCE, _of_ideal, Column("attention_of_single", lambda part: 100 * part)
    ),
    "tflops_per_gpu": Metric("TFLOP/s of a GPU", SPEED_TOLERANCE, _tflops),
    "mfu": Metric("of the peak", SPEED_TOLERANCE, _mfu, Column("mfu_causal", _same), beyond=RATE),
    "comm_bytes": Metric("N h / P elements", EXACT_TOLERANCE, _forward_bytes),
    "comm_bytes_ratio": Metric("x", EXACT_TOLERANCE, _forward_bytes_ratio),
    "communication_share": Metric(
        "%", RATIO_TOLERANCE, None, Column("exposed_communication_share", lambda part: 100 * part)
    ),
    "a2a_share": Metric(
        "%", RATIO_TOLERANCE, None, Column("attention_exchange_share", lambda part: 100 * part)
    ),
    "oom": Metric("", MEMORY_TOLERANCE),
    "max_seq_len": Metric("tokens", MEMORY_TOLERANCE),
    "ruler_score": Metric("%", why_not="quality is out of scope"),
    "prediction_error": Metric("%", why_not="another model's error on its own cells, no cell of ours"),
    "loss_mean_abs_diff": Metric("nats", why_not=LOSSES),
    "loss_max_abs_diff": Metric("nats", why_not=LOSSES),
    "loss_abs_tolerance": Metric("nats", why_not=LOSSES),
    "loss_curves_overlap": Metric("", why_not=LOSSES),
    "loss_at_step": Metric("nats", why_not=LOSSES),
    "final_loss": Metric("nats", why_not=LOSSES),
    "comm_reduction": Metric("", why_not=OTHERS),
    "cp_mandatory": Metric("", why_not=OTHERS),
    "faster_than_ring_rotation": Metric("", why_not=OTHERS),
    "mfu_ratio": Metric("x", why_not=OTHERS),
    "peak_mem_reduction": Metric("%", MEMORY_TOLERANCE, _intermediates_reduction, why_not=OTHERS),
    "seq_len_ratio": Metric("x", why_not=OTHERS),
}
"""Every metric of the registry."""
