"""Cells of experiment=loss_equivalence, which compares sequence parallelism with data parallelism.

As in Hugging Face's post on Ulysses, W data-parallel ranks with one micro-step (the reference) are compared
with W ranks that share one sequence and take W micro-steps, with equal weights, data, optimizer and schedule.
Controls are equivalent to the reference, so their distance from it is noise. A known mistake is
computed on purpose (`inject_fault`), and its distance from the reference has to exceed this noise.
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
COMPARED_STRATEGIES = ("ulysses", "ring", "deepspeed_ulysses", "ring_flash_attn")
"""Strategies that are compared if the request names none."""
DTYPE_OPTIMIZERS: Mapping[str, tuple[str, ...]] = {"bf16": ("adamw",), "fp16": ("adamw",)}
"""Optimizers of dtypes that do not run with all: with SGD the noise of bf16 hides a mask off by one."""
NOISY_DTYPES = ("bf16", "fp16")
"""Dtypes in which the noise of one seed may hide a mistake; they use all seeds of the request."""
OTHER_KERNELS = ("math", "flash_blocks", "torch_flash")
"""Kernels of controls, the first two that no compared cell uses; `flash_blocks` rounds as a ring."""


def comparison_cells(requests: Sequence[Raw], machine: Machine) -> list[Cell]:
    """Return the reference, controls, compared strategies and known mistakes, for each value of open choices.

    Raises ConfigError for an invalid value, and if no ranks share a sequence.
    """
    cells = list[Cell]()
    for request in requests:
        for complete in _with_choices_made(request, machine):
            ulysses = _cell_with_reference_batch(complete, "ulysses", machine)
            if ulysses.sp_degree == 1:
                raise ConfigError(
                    "experiment=loss_equivalence: no ranks share a sequence; take two or more, with"
                    " cluster.world_size and sp_degree"
                )
            cells += _reference_and_controls(complete, ulysses, machine)
            cells += _compared_cells(complete, machine)
            cells += _mistakes(complete, machine)
    return cells


def roles_of(cells: Sequence[Cell]) -> dict[str, Role]:
    """Return roles by cell id; the first `local` cell of a work is the reference, further ones controls."""
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


def _reference_and_controls(request: Raw, compared: Cell, machine: Machine) -> Iterator[Cell]:
    """Yield data parallelism with the work of the compared cell: the reference, and then the controls.

    A control differs from the reference in the order of the ranks' data, the kernel, the number of ranks, or
    the last two. If the compared cell has another trainer than ours, that trainer's data parallelism follows,
    with which the losses that it logs are compared.
    """
    strategy = read_option("strategy", REFERENCE_STRATEGY)
    local = {**request, "strategy": strategy, "layout": "auto", "sp_degree": 1, "dp_replicate": 1}
    ranks, micro_steps = compared.cluster.world_size, compared.grad_accum // compared.sp_degree
    reference_request = {**local, "dp_shard": ranks, "grad_accum": micro_steps, "trainer": {"name": "native"}}
    reference = resolve(reference_request, machine)
    yield reference
    yield replace(reference, data=replace(reference.data, rank_order="reversed"))
    kernels = [name for name in OTHER_KERNELS if name != compared.kernel][:2]
    for kernel in kernels:
        yield resolve({**reference_request, "kernel": kernel}, machine)
    rank_counts = sorted({ranks // 2, 1} if ranks % 2 == 0 else {1}, reverse=True)
    for fewer, kernel in zip(rank_counts, kernels, strict=False):
        cluster = {**request["cluster"], "world_size": fewer}
        changes = {"cluster": cluster, "dp_shard": fewer, "grad_accum": micro_steps * ranks // fewer}
        yield resolve({**reference_request, **changes}, machine)
        yield resolve({**reference_request, **changes, "kernel": kernel}, machine)
    if compared.trainer != "native":
        yield resolve({**reference_request, "trainer": request["trainer"]}, machine)


def _compared_cells(request: Raw, machine: Machine) -> Iterator[Cell]:
    """Yield the cell of the requested strategy, or the cells of COMPARED_STRATEGIES that can run."""
    if "strategy" in request:
        if request["strategy"]["name"] == REFERENCE_STRATEGY:
            raise ConfigError(
                f"strategy={REFERENCE_STRATEGY}: is the reference of experiment=loss_equivalence; name a"
                " strategy that shares sequences, such as strategy=ulysses"
            )
        yield _cell_with_reference_batch(request, request["strategy"]["name"], machine)
        return
    for name in COMPARED_STRATEGIES:
        cell = _cell_with_reference_batch(request, name, machine)
        if refusal(cell) is None:
            yield cell


def _mistakes(request: Raw, machine: Machine) -> Iterator[Cell]:
    """Yield the cells of known mistakes that the request allows, in our own strategies and trainer."""
    ours = {**request, "layout": "auto", "trainer": {"name": "native"}}
    for name, facts in MISTAKES.items():
        cell = _cell_with_reference_batch(ours, facts.strategy, machine)
        if facts.applies_to(cell) and refusal(cell) is None:
            yield replace(cell, inject_fault=name)


def _cell_with_reference_batch(request: Raw, strategy: str, machine: Machine) -> Cell:
    """Return the cell of a strategy with the sequences per step of the reference, in more micro-steps.

    The first `resolve` fills in `sp_degree`, by which `grad_accum` is then multiplied.
    """
    if request.get("strategy", {}).get("name") != strategy:
        known = values.choice("strategy", strategy, STRATEGIES)
        request = {**request, "strategy": read_option("strategy", known)}
    cell = resolve(request, machine)
    return resolve({**request, "grad_accum": cell.grad_accum * cell.sp_degree}, machine)


def _with_choices_made(request: Raw, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a request for each combination of dtype, optimizer and seed; the strategy may stay open."""
    cluster = dict(request["cluster"])
    if cluster["world_size"] == "auto" and place(request["cluster"], machine).device == "cpu":
        cluster["world_size"] = CPU_RANKS
    for dtype in _dtypes(request):
        names = DTYPE_OPTIMIZERS.get(dtype, options("optimizer"))
        defaults = [read_option("optimizer", name) for name in names]
        optimizers = [request["optimizer"]] if "optimizer" in request else defaults
        all_seeds = request["seed"] if isinstance(request["seed"], list) else [request["seed"]]
        seeds = all_seeds if dtype in NOISY_DTYPES else all_seeds[:1]
        for optimizer in optimizers:
            for seed in seeds:
                yield {**request, "cluster": cluster, "dtype": dtype, "optimizer": optimizer, "seed": seed}


def _dtypes(request: Raw) -> list[Any]:
    """Return the requested dtype, or without one the experiment's dtypes in which the strategy runs.

    All of them are returned if the request names no strategy, or one that runs in none of them.
    """
    if not isinstance(request["dtype"], list):
        return [request["dtype"]]
    name = request.get("strategy", {}).get("name")
    supported = STRATEGIES[name].dtypes if name in STRATEGIES else request["dtype"]
    return [dtype for dtype in request["dtype"] if dtype in supported] or request["dtype"]
