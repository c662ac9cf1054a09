"""Questions and the cells that answer them. May import work, planned and what lies below plan.

The one table of experiments: a new one is a function here, a line below and a YAML in conf/experiment/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.common.environment import Machine
from bench.common.labels import shown
from bench.config import Cell, ConfigError
from bench.plan.experiments.loss_equivalence import cells_side_by_side, roles_of
from bench.plan.experiments.max_length import Grow, growing, opening_line
from bench.plan.experiments.probe import probed_cells
from bench.plan.experiments.published import opening, published_cells
from bench.record.record import Role
from bench.request import values
from bench.request.choices import Raw
from bench.request.modes import PREDICT, REPLAY
from bench.request.resolve import resolve


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, and how it is answered."""

    cells: Callable[[Sequence[Raw], Machine], list[Cell]]
    """The cells of a composed request, of which equal ones are one; raises ConfigError for a bad value."""
    workload: str | None = None
    """The only one that it is about; None for any."""
    roles: Callable[[Sequence[Cell]], Mapping[str, Role]] = lambda _: {}
    """Each cell's role by its id, where it is not to answer."""
    opening: Callable[[Sequence[Raw], Machine], str] | None = None
    """What is said first of all; None for nothing."""
    growing: Callable[[Sequence[Raw], Machine], Grow] | None = None
    """What the records so far lead to, beyond the first cells; None where all cells are known at once."""
    compares_values: bool = False
    """Whether it is about losses, gradients or attention's values, which a replay does not have."""
    needs_sharing: bool = True
    """Whether strategies that nobody named are kept also where no ranks can share a sequence."""


EXPERIMENTS: Mapping[str, Experiment] = {
    "none": Experiment(lambda raws, machine: [resolve(raw, machine) for raw in raws], needs_sharing=False),
    "loss_equivalence": Experiment(cells_side_by_side, "train", roles=roles_of, compares_values=True),
    "max_length": Experiment(
        lambda raws, machine: growing(raws, machine)([]), opening=opening_line, growing=growing
    ),
    "probe": Experiment(probed_cells, "train", compares_values=True),
    "published_memory": Experiment(published_cells, opening=opening),
    "published_throughput": Experiment(published_cells, opening=opening),
}


def experiment_of(raws: Sequence[Raw]) -> Experiment:
    """The one experiment of a request.

    Raises ConfigError for none that exists, for several and for a key that belongs to another.
    """
    names = {values.choice("experiment", raw["experiment"]["name"], EXPERIMENTS) for raw in raws}
    if len(names) > 1:
        raise ConfigError(
            f"experiment={','.join(sorted(names))}: a command takes one experiment; choose one of them"
        )
    name = names.pop()
    workload = EXPERIMENTS[name].workload
    for raw in raws:
        if workload not in (None, raw["workload"]["name"]):
            raise ConfigError(
                f"workload={shown(raw['workload']['name'])}: experiment={name} is about workload={workload};"
                " leave it out"
            )
        if raw["mode"] in (PREDICT, REPLAY) and EXPERIMENTS[name].compares_values:
            raise ConfigError(
                f"mode={raw['mode']}: experiment={name} compares values, which only measuring has; leave mode"
                " out"
            )
        if raw["length_step"] is not None and EXPERIMENTS[name].growing is None:
            raise ConfigError(
                f"length_step={shown(raw['length_step'])}: belongs to experiment=max_length; leave it out"
            )
    return EXPERIMENTS[name]
