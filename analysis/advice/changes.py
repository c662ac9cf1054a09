"""What would change the answer: settings beside the strategy that make it faster, or make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from analysis.advice.option import Option
from analysis.advice.ranking import RESOLUTION, behind
from analysis.advice.words import full_name, memory_of, percents
from bench.config import RunConfig
from bench.cost.fit import Fit

Forecast = Callable[[RunConfig], Option]
Setting = Callable[[RunConfig], RunConfig]
SETTINGS: Mapping[str, Setting] = {
    "checkpointing=true": lambda cell: replace(cell, checkpointing=True),
    "checkpointing=false": lambda cell: replace(
        cell, checkpointing=False, offload=replace(cell.offload, activations=False)
    ),
    "loss=chunked": lambda cell: replace(cell, loss="chunked"),
    "tiled_mlp=true": lambda cell: replace(cell, tiled_mlp=True),
    "offload.activations=true": lambda cell: replace(cell, offload=replace(cell.offload, activations=True)),
    "offload.optimizer=true": lambda cell: replace(cell, offload=replace(cell.offload, optimizer=True)),
}
"""What else can be chosen, by its words; kernels of which a rate is known come in addition."""
UNPRICED = ("offload.activations=true", "offload.optimizer=true")
"""Settings whose time nothing predicts: they are named for the memory that they save alone."""
MOST = 3


def what_would_change(option: Option, kernels: Mapping[str, object], forecast: Forecast) -> list[str]:
    """Of an option that fits what makes it faster, of another what makes it fit; the best few."""
    found = (_changed(option, words, change, forecast) for words, change in _settings(kernels).items())
    told = sorted((each for each in found if each is not None), key=lambda each: -each[0])
    return [words for _, words in told[:MOST]]


def _settings(kernels: Mapping[str, object]) -> dict[str, Setting]:
    return {**{f"kernel={kernel}": _with_kernel(kernel) for kernel in kernels}, **SETTINGS}


def _with_kernel(kernel: str) -> Setting:
    return lambda cell: replace(cell, kernel=kernel)


def _changed(option: Option, words: str, change: Setting, forecast: Forecast) -> tuple[float, str] | None:
    """How much is gained, and that in words; None where nothing is."""
    cell = change(option.cell)
    if cell == option.cell:
        return None
    changed = forecast(cell)
    if changed.prediction is None or changed.may_lack_memory:
        return None
    if option.may_lack_memory:
        return changed.corner_rates[0], f"{words}: {full_name(changed)} fits, with {memory_of(changed)}"
    gain = behind(replace(option, measured=None), changed)
    if gain.low < RESOLUTION or words in UNPRICED:
        return None
    return gain.low, f"{words} is {percents(gain.low, gain.high)} faster"


def first_that_fits(sizes: Iterator[int], best: Callable[[int], Option | None]) -> str | None:
    """The least of these numbers of ranks at which something fits, in words."""
    for size in sizes:
        option = best(size)
        if option is not None and option.fit is Fit.FITS:
            return f"cluster.world_size={size}: {full_name(option)} fits, with {memory_of(option)}"
    return None
