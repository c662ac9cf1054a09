"""The answer in sentences: which strategy, does it fit, how fast, why, and how sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.advice.option import PARTS, Option
from analysis.advice.ranking import NEAR, RESOLUTION, Ranking, behind
from analysis.advice.words import (
    full_name,
    listed,
    memory_of,
    name_of,
    number,
    percent,
    percent_band,
    percents,
)
from bench.config import RunConfig
from bench.cost.fit import Fit
from bench.cost.hardware import file_of
from bench.labels import duration_label, length_label

SHORT_STEP_S = 120
NAMED_SHARE = 0.005
"""A part of a step below this is not named."""
ALIKE = 1e-3
"""Steps whose parts differ by less of the step are one computation under two names."""
HOW_SURE = (
    "How sure: predictions, nothing ran. Bands are what the rates in {file} leave"
    " open; strategies are compared at equal rates, and differences below {resolution} are not reported."
)

OF_A_CPU = "These are rates of a CPU: they do not say which strategy is faster on GPUs."


def title(cell: RunConfig) -> str:
    """What is asked about: `qwen3_8b, 128k tokens, 8 x h100_80gb: ...`."""
    return f"{cell.model.name}, {length_label(cell.seq_len)} tokens, {setting(cell)}"


def setting(cell: RunConfig) -> str:
    """The same without what figures vary: `8 x h100_80gb: zero3, bf16, ...`."""
    saved = [
        "checkpointing" if cell.checkpointing else "no checkpointing",
        f"{cell.loss} loss",
        *(["tiled MLP"] if cell.tiled_mlp else []),
        *(["activations offloaded"] if cell.offload.activations else []),
        *(["optimizer offloaded"] if cell.offload.optimizer else []),
    ]
    return (
        f"{cell.cluster.world_size} x {cell.hardware}: {cell.engine.name}, {cell.dtype}, {cell.kernel},"
        f" {', '.join(saved)}"
    )


def answer(ranking: Ranking) -> list[str]:
    """Some sentences, one a line; where nothing can run, that."""
    first = ranking.first
    if first is None:
        return ["No strategy has room for this." if ranking.too_large else "No strategy can run this."]
    return [
        _which(ranking, first),
        _fits(first),
        _speed(first),
        _why(ranking, first),
        *_how_sure(ranking, first),
    ]


def rival_of(ranking: Ranking, first: Option) -> Option | None:
    """The best that computes or sends something else than the first."""
    return next((each for each in ranking.best if each is not first and not _is_alike(first, each)), None)


def _which(ranking: Ranking, first: Option) -> str:
    level = [*dict.fromkeys(name_of(each) for each in ranking.level(first))]
    rival = next((each for each in ranking.best if name_of(each) not in level), None)
    told = f"No clear difference between {listed(level, most=8)}; " if len(level) > 1 else ""
    told += f"{full_name(first)} comes first"
    if first is not ranking.fastest:
        told += f": of those within {_whole_percent(NEAR)} of the fastest it needs least memory"
    told += "."
    if rival is None:
        return told
    found = behind(first, rival)
    if found.is_told:
        return f"{told} {full_name(rival)} is {percents(-found.high, -found.low)} slower."
    return f"{told} {full_name(rival)} may be as fast, but whether it fits is undecided."


def _fits(first: Option) -> str:
    if first.fit is None:
        return f"A rank needs {memory_of(first)}; nothing says what it may take."
    if first.fit is Fit.UNDECIDED:
        return f"Whether {full_name(first)} fits is undecided: it needs {memory_of(first)}."
    if first.measured is not None:
        return f"It fitted: {memory_of(first)} were allocated."
    return f"It fits: a rank needs {memory_of(first)}."


def _speed(first: Option) -> str:
    rate, ranks = first.tokens_per_s, first.cell.cluster.world_size
    low, expected, high = (number(each * ranks) for each in (rate.low, rate.expected, rate.high))
    step_s = first.cell.tokens_per_step / (rate.expected * ranks)
    took = f"{number(step_s)} s" if step_s < SHORT_STEP_S else duration_label(step_s)
    sequences = first.cell.sequences_per_step
    return (
        f"How fast: {expected} tokens/s ({low} to {high}), {number(rate.expected)} of each rank; {took} a"
        f" step of {sequences} sequence{'s' * (sequences > 1)}. The exchange's transfer takes"
        f" {percent_band(first.transfer)} of it."
    )


def _why(ranking: Ranking, first: Option) -> str:
    """What the step is spent on, and where the best of another strategy spends more or less."""
    shares = sorted(first.shares.items(), key=lambda part: -part[1])
    named = [f"{name} {percent(share)}" for name, share in shares if share >= NAMED_SHARE]
    why = f"Why: a step is {listed(named, most=5)}."
    other = rival_of(ranking, first)
    if other is None:
        return why
    changes = sorted(_changes(first, other).items(), key=lambda change: -abs(change[1]))
    largest = ((name, percent(abs(change)), "more" if change > 0 else "less") for name, change in changes[:2])
    told = [f"{share} {more} {name}" for name, share, more in largest]
    return f"{why} For as many tokens {full_name(other)} takes {' and '.join(told)}, as shares of it."


def _changes(first: Option, other: Option) -> dict[str, float]:
    """By how much of the first's step the other's parts are longer, for as many tokens."""
    scale = first.cell.tokens_per_step / other.cell.tokens_per_step
    step_ms = first.corners[0].step_ms
    return {name: (scale * other.part_ms(name) - first.part_ms(name)) / step_ms for name in PARTS}


def _is_alike(one: Option, other: Option) -> bool:
    return all(abs(change) < ALIKE for change in _changes(one, other).values())


def _how_sure(ranking: Ranking, first: Option) -> Sequence[str]:
    ran = [each for each in (*ranking.able, *ranking.too_large) if each.measured is not None]
    lines = [_measured(each) for each in ran]
    if all(each.measured is not None for each in ranking.able):
        return lines
    if ran:
        lines.append("Between what is measured and what is predicted no difference is told.")
    lines.append(HOW_SURE.format(file=file_of(first.cell.hardware), resolution=_whole_percent(RESOLUTION)))
    return lines if first.cell.cluster.device == "cuda" else [*lines, OF_A_CPU]


def _measured(option: Option) -> str:
    """The number that stands in place of a prediction, and where from."""
    assert option.measured is not None
    assert option.prediction is not None
    if option.measured.ran_out:
        return (
            f"Measured: {full_name(option)} ran out of memory; predicted was that it needs {_need(option)}."
        )
    count = len(option.measured.tokens_per_s)
    expected = option.cell.tokens_per_step / option.prediction.step_time_ms.expected * 1e3
    rate = option.tokens_per_s.expected * option.cell.cluster.world_size
    return (
        f"Measured: {full_name(option)}, {number(rate)} tokens/s in {count} process{'es' * (count > 1)};"
        f" predicted were {number(expected)}."
    )


def _need(option: Option) -> str:
    return memory_of(replace(option, measured=None))


def _whole_percent(fraction: float) -> str:
    return f"{fraction:.0%}".replace("%", " %")
