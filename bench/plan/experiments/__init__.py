"""Experiments: questions with the cells that answer them. May import work, planned and what lies below plan.

EXPERIMENTS is the only table; a new experiment needs a function, a line there and a YAML in conf/experiment/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.common.environment import Machine
from bench.common.labels import value_label
from bench.config import Cell, ConfigError
from bench.plan.experiments.loss_equivalence import comparison_cells, roles_of
from bench.plan.experiments.max_length import Grow, make_grow, search_line
from bench.plan.experiments.probe import probed_cells
from bench.plan.experiments.published import mode_line, published_cells
from bench.record.record import Role
from bench.request import values
from bench.request.choices import Raw
from bench.request.modes import PREDICT, REPLAY
from bench.request.resolve import resolve


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, and the functions that choose the cells that answer it."""

    cells: Callable[[Sequence[Raw], Machine], list[Cell]]
    """Function that returns the cells of composed requests, perhaps with duplicates.

    It raises ConfigError for an invalid value.
    """
    workload: str | None = None
    """Only workload of the experiment; None if it takes any."""
    roles: Callable[[Sequence[Cell]], Mapping[str, Role]] = lambda _: {}
    """Function that returns roles by cell id; a cell without an entry answers the question."""
    opening_line: Callable[[Sequence[Raw], Machine], str] | None = None
    """Function that returns the first printed line; None without such a line."""
    make_grow: Callable[[Sequence[Raw], Machine], Grow] | None = None
    """Function that returns a `Grow`; None if all cells are known from the start."""
    compares_values: bool = False
    """Whether the experiment compares losses, gradients or attention values, which a replay does not have."""
    needs_sharing: bool = True
    """Whether default strategies are kept even if no ranks share a sequence."""


EXPERIMENTS: Mapping[str, Experiment] = {
    "none": Experiment(lambda raws, machine: [resolve(raw, machine) for raw in raws], needs_sharing=False),
    "loss_equivalence": Experiment(comparison_cells, "train", roles=roles_of, compares_values=True),
    "max_length": Experiment(
        lambda raws, machine: make_grow(raws, machine)([]), opening_line=search_line, make_grow=make_grow
    ),
    "probe": Experiment(probed_cells, "train", compares_values=True),
    "published_memory": Experiment(published_cells, opening_line=mode_line),
    "published_throughput": Experiment(published_cells, opening_line=mode_line),
}


def experiment_of(raws: Sequence[Raw]) -> Experiment:
    """Return the experiment of a sweep.

    Raises ConfigError for an unknown experiment, for several, and for a key that belongs to another one.
    """
    names = {values.choice("experiment", raw["experiment"]["name"], EXPERIMENTS) for raw in raws}
    if len(names) > 1:
        raise ConfigError(
            f"experiment={','.join(sorted(names))}: a command runs one experiment; choose one of these"
        )
    name = names.pop()
    workload = EXPERIMENTS[name].workload
    for raw in raws:
        if workload not in (None, raw["workload"]["name"]):
            raise ConfigError(
                f"workload={value_label(raw['workload']['name'])}: experiment={name} takes only"
                f" workload={workload}; leave workload out"
            )
        if raw["mode"] in (PREDICT, REPLAY) and EXPERIMENTS[name].compares_values:
            raise ConfigError(
                f"mode={raw['mode']}: experiment={name} compares values, which only mode=measure has; leave"
                " mode out"
            )
        if raw["length_step"] is not None and EXPERIMENTS[name].make_grow is None:
            raise ConfigError(
                f"length_step={value_label(raw['length_step'])}: belongs to experiment=max_length; leave it"
                " out"
            )
    return EXPERIMENTS[name]
