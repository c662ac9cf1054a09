"""Which implementation is faster: every one that is installed here and ours that it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from bench.attention.kernel_facts import DEFAULT_KERNEL, FLASH_ATTN, KERNEL_FACTS
from bench.config import AUTO, ConfigError, RunConfig
from bench.environment import Machine
from bench.request.choices import Raw, option_of
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import Facts
from bench.strategies.options import Option, default_text, in_yaml

WITHOUT_EFFECT = ("checkpoints", "inner")
"""Options that one call on one node does not know: what layers keep, and whose ranks are neighbours."""


def implementation_cells(raws: Sequence[Raw], machine: Machine) -> list[RunConfig]:
    """A cell for each strategy that shares sequences with each of its own choices, and ours beside it.

    A strategy that a request names is taken alone, as it is. Raises ConfigError for an invalid value.
    """
    cells = list[RunConfig]()
    for raw in raws:
        for strategy in [raw["strategy"]] if "strategy" in raw else _strategies():
            cell = resolve({**raw, "strategy": strategy}, machine)
            if cell.sp_degree == 1:
                raise ConfigError(
                    "experiment=implementations: no ranks share a sequence; take two or more, with"
                    " cluster.world_size and sp_degree"
                )
            if raw["kernel"] == AUTO:
                cell = _on_flash_attn(cell)
            ours = counterpart_of(cell) if refusal(cell) is None else None
            cells += [cell] if ours is None else [ours, cell]
    return [*{cell.cell_id: cell for cell in cells}.values()]


def counterpart_of(cell: RunConfig) -> RunConfig | None:
    """Ours that it is compared with: in the same layout, beside a package with its kernel and degrees too."""
    facts = STRATEGIES[cell.strategy]
    with STRATEGIES.plugin_errors_named(cell.strategy):
        name = facts.counterpart(cell)
    if name is None:
        return None
    ours = STRATEGIES[name]
    usual = _with_own_choices(cell, ours)
    runs_as_best = facts.package is None and facts.kernels is not None
    return replace(
        usual,
        layout=cell.layout if cell.layout in ours.layouts else ours.default_layout,
        kernel=DEFAULT_KERNEL if runs_as_best else cell.kernel,
        ulysses_degree=cell.ulysses_degree if ours.is_hybrid else usual.ulysses_degree,
    )


def label_of(cell: RunConfig) -> str:
    """`torch_cp rotation=alltoall`: its strategy, with every choice that is not the default."""
    facts = STRATEGIES[cell.strategy]
    usual = _with_own_choices(cell, facts)
    kernels = (DEFAULT_KERNEL,) if facts.kernels is None else facts.kernels
    choices = [f"{key}={value}" for key, value in cell.options if value != usual.option(key)]
    choices += [cell.layout] if cell.layout != facts.default_layout else []
    choices += [cell.kernel] if cell.kernel not in (DEFAULT_KERNEL, kernels[0]) else []
    if cell.ulysses_degree != usual.ulysses_degree:
        choices.append(f"ulysses_degree={cell.ulysses_degree}")
    return " ".join([facts.name, *choices])


def _with_own_choices(cell: RunConfig, facts: Facts) -> RunConfig:
    """The cell under this strategy, with the strategy's own options and degrees as they are by default."""
    defaults = {key: default_text(own, cell) for key, own in facts.options.items()}
    degree = facts.ulysses_degree(cell.sp_degree, cell.model)
    return replace(cell, strategy=facts.name, options=tuple(defaults.items()), ulysses_degree=degree)


def _on_flash_attn(cell: RunConfig) -> RunConfig:
    """A package that calls flash-attn is given it where it is installed, as its users have it."""
    flash_attn = KERNEL_FACTS[FLASH_ATTN]
    refused = [*flash_attn.refusals(cell), *flash_attn.package_refusals(cell)]
    calls = STRATEGIES[cell.strategy].calls_flash_attn
    return replace(cell, kernel=FLASH_ATTN) if calls and not refused else cell


def _strategies() -> Iterator[dict[str, Any]]:
    """Every strategy with every combination of its own options; of an `auto` its own choice alone."""
    for facts in STRATEGIES.usable():
        if facts.shares_sequences:
            own = {key: _values(option) for key, option in facts.options.items() if key not in WITHOUT_EFFECT}
            for chosen in product(*own.values()):
                yield option_of(facts) | dict(zip(own, chosen, strict=True))


def _values(option: Option) -> tuple[Any, ...]:
    """The default first; alone where it is `auto`."""
    default = in_yaml(option)
    if isinstance(option, tuple):
        return option
    return (default,) if default == AUTO else (default, not default)
