"""Does sequence parallelism train what data parallelism trains? The same steps, side by side.

As Hugging Face's post on Ulysses compares them: W data-parallel ranks with one micro-step against W ranks of
one sequence with W micro-steps; weights, data, optimizer and schedule are the same. Controls do the same
work in other, equivalent ways, so their differences are noise. Known mistakes show what is beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.common.environment import Machine
from bench.config import NO_MISTAKE, Cell, ConfigError
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
SUBJECTS = ("ulysses", "ring", "deepspeed_ulysses", "ring_flash_attn")
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {"bf16": ("adamw",), "fp16": ("adamw",)}
"""Where not all are taken: under SGD the noise of bf16 hides a mask that is off by one in a small model."""
NOISY = ("bf16", "fp16")
"""Where a mistake may hide in the noise of one seed, so that those of the experiment are taken together."""
OTHER_KERNELS = ("math", "flash_blocks", "torch_flash")
"""Of these the first two that are not the cells' own; `flash_blocks` rounds blocks of keys as a ring does."""


def cells_side_by_side(raws: Sequence[Raw], machine: Machine) -> list[Cell]:
    """For every request and each of its open choices reference, controls, subjects, mistakes, in that order.

    Raises ConfigError for an invalid value, and where no ranks share a sequence.
    """
    cells = list[Cell]()
    for raw in raws:
        for closed in _closed(raw, machine):
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
    """Each cell's role by its id: the first `local` of a work is what all others are compared with."""
    roles: dict[str, Role] = {}
    begun = set[str]()
    for cell in cells:
        if cell.inject_fault != NO_MISTAKE:
            roles[cell.cell_id] = Role.INJECTED_FAULT
        elif cell.strategy != REFERENCE_STRATEGY or cell.trainer != "native":
            roles[cell.cell_id] = Role.CELL
        else:
            roles[cell.cell_id] = Role.CONTROL if work_of(cell) in begun else Role.REFERENCE
            begun.add(work_of(cell))
    return roles


def _references(raw: Raw, base: Cell, machine: Machine) -> Iterator[Cell]:
    """Plain data parallelism, and the controls: data dealt otherwise, other kernels, fewer ranks, and both.

    Of another trainer than ours its own data parallelism too: what it logs is compared with that.
    """
    local = {**raw, "strategy": read_option("strategy", REFERENCE_STRATEGY), "layout": "auto", "sp_degree": 1}
    ranks, micro_steps = base.cluster.world_size, base.grad_accum // base.sp_degree
    of_all = {**local, "dp_shard": ranks, "grad_accum": micro_steps, "trainer": {"name": "native"}}
    reference = resolve(of_all, machine)
    yield reference
    yield replace(reference, data=replace(reference.data, rank_order="reversed"))
    kernels = [name for name in OTHER_KERNELS if name != base.kernel][:2]
    for kernel in kernels:
        yield resolve({**of_all, "kernel": kernel}, machine)
    fewer_ranks = sorted({ranks // 2, 1} if ranks % 2 == 0 else {1}, reverse=True)
    for fewer, kernel in zip(fewer_ranks, kernels, strict=False):
        cluster = {**raw["cluster"], "world_size": fewer}
        of_fewer = {"cluster": cluster, "dp_shard": fewer, "grad_accum": micro_steps * ranks // fewer}
        yield resolve({**of_all, **of_fewer}, machine)
        yield resolve({**of_all, **of_fewer, "kernel": kernel}, machine)
    if base.trainer != "native":
        yield resolve({**of_all, "trainer": raw["trainer"]}, machine)


def _subjects(closed: Raw, raw: Raw, machine: Machine) -> Iterator[Cell]:
    """The strategies that were asked for; where none was, those of SUBJECTS that can run here."""
    if "strategy" in raw:
        if raw["strategy"]["name"] == REFERENCE_STRATEGY:
            raise ConfigError(
                f"strategy={REFERENCE_STRATEGY}: is what others are compared with in"
                " experiment=loss_equivalence; name one that shares sequences, such as strategy=ulysses"
            )
        yield _subject(closed, raw["strategy"]["name"], machine)
        return
    for name in SUBJECTS:
        cell = _subject(closed, name, machine)
        if refusal(cell) is None:
            yield cell


def _mistakes(raw: Raw, machine: Machine) -> Iterator[Cell]:
    """Known mistakes of our own strategies under our own trainer, whatever is compared; those that can be."""
    own = {**raw, "layout": "auto", "trainer": {"name": "native"}}
    for name, facts in MISTAKES.items():
        cell = _subject(own, facts.made_in, machine)
        if facts.needs(cell) and refusal(cell) is None:
            yield replace(cell, inject_fault=name)


def _subject(raw: Raw, strategy: str, machine: Machine) -> Cell:
    """The ranks share sequences, and take as many more micro-steps as they hold fewer of them at once."""
    if raw.get("strategy", {}).get("name") != strategy:
        known = values.choice("strategy", strategy, STRATEGIES)
        raw = {**raw, "strategy": read_option("strategy", known)}
    cell = resolve(raw, machine)
    return resolve({**raw, "grad_accum": cell.grad_accum * cell.sp_degree}, machine)


def _closed(raw: Raw, machine: Machine) -> Iterator[dict[str, Any]]:
    """The request with every choice made but the strategy's: what it names, else all there is."""
    cluster = dict(raw["cluster"])
    if cluster["world_size"] == "auto" and place(raw["cluster"], machine).device == "cpu":
        cluster["world_size"] = CPU_RANKS
    for dtype in _dtypes(raw):
        names = OPTIMIZERS.get(dtype, options("optimizer"))
        every = [read_option("optimizer", name) for name in names]
        # Seeds of the experiment, the first alone where all show the same.
        seeds = raw["seed"] if isinstance(raw["seed"], list) else [raw["seed"]]
        for optimizer in [raw["optimizer"]] if "optimizer" in raw else every:
            for seed in seeds if dtype in NOISY else seeds[:1]:
                yield {**raw, "cluster": cluster, "dtype": dtype, "optimizer": optimizer, "seed": seed}


def _dtypes(raw: Raw) -> list[Any]:
    """The one that is asked for; else those of the experiment that the strategy runs in, if it is named."""
    if not isinstance(raw["dtype"], list):
        return [raw["dtype"]]
    name = raw.get("strategy", {}).get("name")
    takes = STRATEGIES[name].dtypes if name in STRATEGIES else raw["dtype"]
    return [dtype for dtype in raw["dtype"] if dtype in takes] or raw["dtype"]
