"""Experiments: questions with the cells that answer them.

A new experiment needs a function that returns its cells, an entry in EXPERIMENTS and a file in
conf/experiment/. Its module may import `bench.plan.work`, `bench.plan.planned` and the layers below
`bench.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.common.environment import Machine
from bench.common.labels import value_label
from bench.config import Cell, ConfigError
from bench.plan.experiments import quality
from bench.plan.experiments.loss_equivalence import comparison_cells, roles_of
from bench.plan.experiments.max_length import CellChooser, make_cell_chooser, opening_text
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
    """The only workload that the experiment accepts; None if it accepts every workload."""
    roles: Callable[[Sequence[Cell]], Mapping[str, Role]] = lambda _: {}
    """Function that returns roles by cell id; a cell without an entry has Role.CELL."""
    opening_line: Callable[[Sequence[Raw], Machine], str] | None = None
    """Function that returns the text that is printed first; None without such a text."""
    make_cell_chooser: Callable[[Sequence[Raw], Machine], CellChooser | None] | None = None
    """Function that returns a `CellChooser`, or None if all cells of the requests are known before the first
    one runs; None if they always are."""
    compares_values: bool = False
    """Whether the experiment compares losses, gradients or attention values, which a replay does not have."""
    needs_sharing: bool = True
    """Whether default strategies that share sequences stay in the plan even if no ranks share one here."""


EXPERIMENTS: Mapping[str, Experiment] = {
    "none": Experiment(
        lambda requests, machine: [resolve(request, machine) for request in requests], needs_sharing=False
    ),
    "loss_equivalence": Experiment(comparison_cells, "train", roles=roles_of, compares_values=True),
    "max_length": Experiment(
        lambda requests, machine: make_cell_chooser(requests, machine)([]),
        opening_line=opening_text,
        make_cell_chooser=make_cell_chooser,
    ),
    "quality": Experiment(
        quality.first_cells,
        "train",
        roles=quality.roles_of,
        opening_line=quality.opening_text,
        make_cell_chooser=quality.make_cell_chooser,
        compares_values=True,
    ),
    "published_memory": Experiment(published_cells, opening_line=mode_line),
    "published_throughput": Experiment(published_cells, opening_line=mode_line),
}


def experiment_of(requests: Sequence[Raw]) -> Experiment:
    """Return the experiment of a sweep.

    Raises ConfigError for an unknown experiment, for several experiments, and for a workload, mode or key
    that the experiment does not accept.
    """
    names = {values.choice("experiment", request["experiment"]["name"], EXPERIMENTS) for request in requests}
    if len(names) > 1:
        raise ConfigError(
            f"experiment={','.join(sorted(names))}: a command runs one experiment; choose one of these"
        )
    name = names.pop()
    workload = EXPERIMENTS[name].workload
    for request in requests:
        if workload not in (None, request["workload"]["name"]):
            raise ConfigError(
                f"workload={value_label(request['workload']['name'])}: experiment={name} takes only"
                f" workload={workload}; leave workload out"
            )
        if request["mode"] in (PREDICT, REPLAY) and EXPERIMENTS[name].compares_values:
            raise ConfigError(
                f"mode={request['mode']}: experiment={name} compares values, which only mode=measure has;"
                " leave mode out"
            )
        if request["length_step"] is not None and name != "max_length":
            raise ConfigError(
                f"length_step={value_label(request['length_step'])}: belongs to experiment=max_length;"
                " leave it out"
            )
    return EXPERIMENTS[name]
