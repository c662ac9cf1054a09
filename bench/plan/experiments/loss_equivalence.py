"""Cells of experiment=loss_equivalence, which compares sequence parallelism with data parallelism.

The comparison is that of Hugging Face's post on Ulysses: W data-parallel ranks with one micro-step, and W
ranks that share one sequence with W micro-steps, with the same weights, data, optimizer and schedule.
Controls do the same work in other, equivalent ways, so their differences are noise. Known mistakes have to
exceed this noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.common.environment import Machine
from bench.config import NO_FAULT, Cell, ConfigError
from bench.measure.mistakes import MISTAKES
from bench.plan.work import REFERENCE_STRATEGY, work_of
from bench.record.record import Role
from bench.request import values
from bench.request.choices import Raw, options, read_option
from bench.request.legality import refusal
from bench.request.placement import place
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES

CPU_RANKS = 4
"""Number of CPU ranks if the request leaves it open."""
SUBJECTS = ("ulysses", "ring", "deepspeed_ulysses", "ring_flash_attn")
"""Strategies that are compared if the request names none."""
DTYPE_OPTIMIZERS: Mapping[str, tuple[str, ...]] = {"bf16": ("adamw",), "fp16": ("adamw",)}
"""Optimizers of dtypes that do not use all: with SGD the noise of bf16 hides an off-by-one mask."""
NOISY_DTYPES = ("bf16", "fp16")
"""Dtypes in which the noise of one seed may hide a mistake, so that all seeds of the experiment are used."""
OTHER_KERNELS = ("math", "flash_blocks", "torch_flash")
"""Kernels of controls: the first two that the cells do not use; `flash_blocks` rounds like a ring."""


def comparison_cells(raws: Sequence[Raw], machine: Machine) -> list[Cell]:
    """Return reference, controls, compared strategies and known mistakes for all open choices.

    Raises ConfigError for an invalid value, and if no ranks share a sequence.
    """
    cells = list[Cell]()
    for raw in raws:
        for closed in _with_choices_made(raw, machine):
            base = _subject(closed, "ulysses", machine)
            if base.sp_degree == 1:
                raise ConfigError(
                    "experiment=loss_equivalence: no ranks share a sequence; take two or more, with"
                    " cluster.world_size and sp_degree"
                )
            cells += [*_references(closed, base, machine), *_subjects(closed, raw, machine)]
            cells += _mistakes(closed, machine)
    return cells


def roles_of(cells: Sequence[Cell]) -> dict[str, Role]:
    """Return the role of each cell by its id; the first cell of `local` for a work is the reference."""
    roles: dict[str, Role] = {}
    work_with_reference = set[str]()
    for cell in cells:
        if cell.inject_fault != NO_FAULT:
            roles[cell.cell_id] = Role.INJECTED_FAULT
        elif cell.strategy != REFERENCE_STRATEGY or cell.trainer != "native":
            roles[cell.cell_id] = Role.CELL
        else:
            roles[cell.cell_id] = Role.CONTROL if work_of(cell) in work_with_reference else Role.REFERENCE
            work_with_reference.add(work_of(cell))
    return roles


def _references(raw: Raw, base: Cell, machine: Machine) -> Iterator[Cell]:
    """Yield plain data parallelism and the controls: another order of data, other kernels, fewer ranks, both.

    For another trainer than ours, also yield that trainer's data parallelism, with which its logged losses
    are compared.
    """
    local = {**raw, "strategy": read_option("strategy", REFERENCE_STRATEGY), "layout": "auto", "sp_degree": 1}
    ranks, micro_steps = base.cluster.world_size, base.grad_accum // base.sp_degree
    request = {**local, "dp_shard": ranks, "grad_accum": micro_steps, "trainer": {"name": "native"}}
    reference = resolve(request, machine)
    yield reference
    yield replace(reference, data=replace(reference.data, rank_order="reversed"))
    kernels = [name for name in OTHER_KERNELS if name != base.kernel][:2]
    for kernel in kernels:
        yield resolve({**request, "kernel": kernel}, machine)
    rank_counts = sorted({ranks // 2, 1} if ranks % 2 == 0 else {1}, reverse=True)
    for fewer, kernel in zip(rank_counts, kernels, strict=False):
        cluster = {**raw["cluster"], "world_size": fewer}
        changes = {"cluster": cluster, "dp_shard": fewer, "grad_accum": micro_steps * ranks // fewer}
        yield resolve({**request, **changes}, machine)
        yield resolve({**request, **changes, "kernel": kernel}, machine)
    if base.trainer != "native":
        yield resolve({**request, "trainer": raw["trainer"]}, machine)


def _subjects(closed: Raw, raw: Raw, machine: Machine) -> Iterator[Cell]:
    """Yield the cell of the requested strategy, or the cells of SUBJECTS that can run here."""
    if "strategy" in raw:
        if raw["strategy"]["name"] == REFERENCE_STRATEGY:
            raise ConfigError(
                f"strategy={REFERENCE_STRATEGY}: is the reference of experiment=loss_equivalence; name a"
                " strategy that shares sequences, such as strategy=ulysses"
            )
        yield _subject(closed, raw["strategy"]["name"], machine)
        return
    for name in SUBJECTS:
        cell = _subject(closed, name, machine)
        if refusal(cell) is None:
            yield cell


def _mistakes(raw: Raw, machine: Machine) -> Iterator[Cell]:
    """Yield the cells of known mistakes that are possible here, in our own strategies and trainer."""
    ours = {**raw, "layout": "auto", "trainer": {"name": "native"}}
    for name, facts in MISTAKES.items():
        cell = _subject(ours, facts.strategy, machine)
        if facts.applies_to(cell) and refusal(cell) is None:
            yield replace(cell, inject_fault=name)


def _subject(raw: Raw, strategy: str, machine: Machine) -> Cell:
    """Return the cell of a strategy with sp_degree times the micro-steps, for the same sequences per step."""
    if raw.get("strategy", {}).get("name") != strategy:
        known = values.choice("strategy", strategy, STRATEGIES)
        raw = {**raw, "strategy": read_option("strategy", known)}
    cell = resolve(raw, machine)
    return resolve({**raw, "grad_accum": cell.grad_accum * cell.sp_degree}, machine)


def _with_choices_made(raw: Raw, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the request with each combination of its open choices, except the strategy."""
    cluster = dict(raw["cluster"])
    if cluster["world_size"] == "auto" and place(raw["cluster"], machine).device == "cpu":
        cluster["world_size"] = CPU_RANKS
    for dtype in _dtypes(raw):
        names = DTYPE_OPTIMIZERS.get(dtype, options("optimizer"))
        every = [read_option("optimizer", name) for name in names]
        optimizers = [raw["optimizer"]] if "optimizer" in raw else every
        # Dtypes without much noise use only the first seed.
        seeds = raw["seed"] if isinstance(raw["seed"], list) else [raw["seed"]]
        for optimizer in optimizers:
            for seed in seeds if dtype in NOISY_DTYPES else seeds[:1]:
                yield {**raw, "cluster": cluster, "dtype": dtype, "optimizer": optimizer, "seed": seed}


def _dtypes(raw: Raw) -> list[Any]:
    """Return the requested dtype, or the dtypes of the experiment that a requested strategy runs in."""
    if not isinstance(raw["dtype"], list):
        return [raw["dtype"]]
    name = raw.get("strategy", {}).get("name")
    supported = STRATEGIES[name].dtypes if name in STRATEGIES else raw["dtype"]
    return [dtype for dtype in raw["dtype"] if dtype in supported] or raw["dtype"]
