"""Trainings beside one another: how far each is from plain data parallelism, in multiples of the noise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from analysis.cells.comparison import FREE, FREE_GROUPS
from analysis.labels import count_label
from analysis.read.archive import MADE_WITH, Archive
from bench.common.labels import length_label
from bench.record.noise import NAMES, Draw, Limit, Noise, distance_of, first_departure, signals_of, units
from bench.record.record import Record, Role, Status

EXPERIMENT = "loss_equivalence"
APART = ("data.rank_order", "inject_fault")
"""What only controls and mistakes do in another way."""
SPREAD = ("batch", "dp_replicate", "dp_shard", "grad_accum")
"""Numbers whose product is the sequences of a step."""
LEAST_CONTROLS = 3
"""Fewer show too little of the noise."""
TOLD = ("seq_len", "model", "dtype", "engine", "optimizer")
"""Settings that always name a comparison; others do where comparisons differ in them."""
NATIVE = "native"
"""The trainer whose loop is ours."""
LEAST_FALL = 0.5
"""In nats: a loss that hardly falls hardly shows what was learnt."""


@dataclass(frozen=True, slots=True)
class Training:
    """One record's steps."""

    record: Record
    origin: Mapping[str, str | None]
    """The code, torch and device that it was made with."""
    loss: Sequence[float] = field(default=())
    """Sum of token losses over the number of valid tokens."""
    grad_norm: Sequence[float] = field(default=())
    logged_loss: Sequence[float | None] | None = None
    """What the training stack itself logs; None where the loop is ours."""

    @property
    def role(self) -> Role:
        return self.record.role

    @property
    def is_ok(self) -> bool:
        """Whether it came to its end and passed every gate of its own."""
        return self.record.status is Status.OK and bool(self.loss)

    @property
    def work(self) -> dict[str, Any]:
        """Every setting in which trainings agree that do the same work, on the same machine, but the seed."""
        config = self.record.config
        free = FREE.union(APART)
        kept = {key: each for key, each in config.items() if not (key in free or key.startswith(FREE_GROUPS))}
        sequences = math.prod(config.get(key) or 1 for key in SPREAD)
        return {**kept, "sequences": sequences, **self.origin, "provenance": self.record.provenance}

    @property
    def seed(self) -> int:
        return int(self.setting("seed") or 0)

    @property
    def way(self) -> str:
        """How it does the work: what is equal in trainings that differ in their seed alone."""
        free, groups = FREE.union(APART) - {"seed"}, tuple({*FREE_GROUPS} - {"measure."})
        config = self.record.config.items()
        chosen = {key: each for key, each in config if key in free or key.startswith(groups)}
        return json.dumps([self.role, self.record.repeat, chosen], sort_keys=True)

    @property
    def label(self) -> str:
        """`ring zigzag`, `ulysses contiguous under trl`, `mistake: mask_off_by_one` or what a control is."""
        if self.role == Role.INJECTED_FAULT:
            return f"mistake: {self.setting('inject_fault')}"
        words = [str(self.setting("strategy")), str(self.setting("layout"))]
        if self.role == Role.CONTROL:
            words = ["control:", *self._differs()]
        return " ".join(
            words if self.setting("trainer") == NATIVE else [*words, "under", str(self.setting("trainer"))]
        )

    def _differs(self) -> list[str]:
        """What a control does in another way than the reference."""
        ranks = count_label(int(self.setting("cluster.world_size")), "rank")
        parts = [f"{ranks}, {self.setting('kernel')} kernel"]
        return [*parts, "dealt in reverse"] if self.setting("data.rank_order") == "reversed" else parts

    def setting(self, key: str) -> Any:
        """A value of the record's configuration, None where it has no such setting."""
        return self.record.config.get(key)


@dataclass(frozen=True)
class Seed:
    """All trainings of the same work from the same weights on the same data."""

    reference: Training
    others: Sequence[Training]

    @cached_property
    def equivalent(self) -> list[Training]:
        """The reference and the controls that passed their own gates: a wrong one would widen the floor."""
        controls = [each for each in self.others if each.role == Role.CONTROL and each.is_ok]
        return [self.reference, *controls]

    def draw(self, found: Training) -> Draw:
        """A training beside the equivalent ones, without itself."""
        return Draw(found, [each for each in self.equivalent if each is not found])

    def apart(self, found: Training) -> dict[str, list[float]]:
        """By signal, step by step: the loss's distance from the others' mean in nats, the norm's relative."""
        centre = self.draw(found).centre
        losses = zip(found.loss, centre.loss, strict=False)
        norms = zip(found.grad_norm, centre.grad_norm, strict=False)
        return {
            "loss": [abs(own - other) for own, other in losses],
            "grad_norm": [abs(own - other) / (abs(other) or 1.0) for own, other in norms],
        }


@dataclass(frozen=True, slots=True)
class Compared:
    """One way to do the work, over all seeds in which it ran, beside the equivalent ones."""

    trainings: Sequence[Training]
    """One a seed."""
    mean_loss: float
    """Mean absolute difference of the loss from the reference's, in nats."""
    max_loss: float
    max_grad_norm: float
    """Largest relative difference of the gradient norm."""
    noise: Limit
    """How far it is from the mean of the equivalent ones, in multiples of the noise floor."""
    logged: tuple[float, float] | None
    """Mean and largest difference of what the stack logs from what it logs of data parallelism, in nats;
    None where the stack logs nothing of its own, or there is no such record."""
    departure: str | None
    """The first step that is beyond the floor, in words, where the mean over all steps is."""

    @property
    def training(self) -> Training:
        """The one that speaks for all seeds: the first that did not end well, if any."""
        return next((each for each in self.trainings if not each.is_ok), self.trainings[0])

    @property
    def is_within(self) -> bool:
        return max(self.noise.loss, self.noise.grad_norm) <= 1

    @property
    def is_as_expected(self) -> bool:
        """Whether a mistake was found, and anything else passed its own gates and, if compared, this one."""
        if self.training.role == Role.INJECTED_FAULT:
            return not self.is_within
        is_one_of_the_equivalent = self.training.role == Role.CONTROL
        return self.training.is_ok and (is_one_of_the_equivalent or self.is_within)


@dataclass(frozen=True)
class Comparison:
    """All trainings of the same work, of every seed."""

    seeds: Sequence[Seed]
    told: tuple[str, ...] = ()
    """Further settings that name it, because other comparisons differ in them."""

    @property
    def reference(self) -> Training:
        return self.seeds[0].reference

    @cached_property
    def noise(self) -> Noise:
        return Noise([each.equivalent for each in self.seeds])

    @property
    def others(self) -> list[Training]:
        return [each for seed in self.seeds for each in seed.others]

    @property
    def least_controls(self) -> int:
        """Controls that ended well, in the seed that has the fewest."""
        return min(len(each.equivalent) - 1 for each in self.seeds)

    @property
    def controls(self) -> int:
        """Controls that ended well, of all seeds."""
        return sum(len(each.equivalent) - 1 for each in self.seeds)

    @property
    def compared(self) -> int:
        """Ways whose work should be the same and that are no controls."""
        return len({each.way for each in self.others if each.role == Role.CELL and each.loss})

    def floor(self, seeds: int | None = None) -> Limit:
        """The distance that one of what is compared crosses by chance in FALSE_ALARMS of comparisons.

        The distance is that of a training that ran in so many seeds; None for all of them.
        """
        return self.noise.floor(seeds or len(self.seeds), self.compared)

    @cached_property
    def rows(self) -> list[Compared]:
        """Every other training that ran, subjects first, then controls, then mistakes."""
        order = (Role.CELL, Role.REFERENCE, Role.CONTROL, Role.INJECTED_FAULT)
        ways: dict[str, list[tuple[Seed, Training]]] = {}
        for seed in self.seeds:
            for each in seed.others:
                if each.loss and seed.draw(each).others:
                    ways.setdefault(each.way, []).append((seed, each))
        rows = [self._compared(each) for each in ways.values()]
        return sorted(rows, key=lambda each: order.index(each.training.role))

    @property
    def without_steps(self) -> list[Training]:
        """Those whose ranks did not come to the end of a step."""
        return [each for each in self.others if not each.loss]

    @property
    def steps(self) -> int:
        """Those that the references and every subject ran."""
        subjects = [each for each in self.others if each.role == Role.CELL and each.loss]
        references = [each.reference for each in self.seeds]
        return min(len(each.loss) for each in (*references, *subjects))

    @property
    def fall(self) -> float:
        """By how much the reference's loss fell, in nats; of several the one that fell least."""
        return min(each.reference.loss[0] - each.reference.loss[-1] for each in self.seeds)

    @property
    def name(self) -> str:
        """`1k, qwen3_nano, fp32, zero3, adamw`, and the number of seeds where there are several."""
        seq_len, *others = (self.reference.setting(key) for key in TOLD)
        more = [f"{key}={self.reference.work[key]}" for key in self.told]
        more += [f"{len(self.seeds)} seeds"] if len(self.seeds) > 1 else []
        return ", ".join([length_label(int(seq_len)), *map(str, others), *more])

    @property
    def machine(self) -> str:
        """`measured, cpu, AMD EPYC`."""
        record = self.reference.record
        parts = (record.provenance, self.reference.setting("hardware"), record.environment.device_name)
        return ", ".join(str(part) for part in parts if part)

    def apart(self, row: Compared) -> dict[str, list[float]]:
        """By signal, step by step, as `Seed.apart`; of several seeds the root mean square."""
        seeds = {seed.reference.seed: seed for seed in self.seeds}
        return _by_step([seeds[each.seed].apart(each) for each in row.trainings])

    def floor_by_step(self) -> dict[str, list[float]]:
        """As `apart`, of a training that is at the floor in every step."""
        floor = self.floor()
        of_seeds = []
        for seed in self.seeds:
            unit, norms = units(seed.reference), seed.reference.grad_norm
            of_norm = (each / (abs(norm) or 1.0) for each, norm in zip(unit["grad_norm"], norms, strict=True))
            of_seeds.append(
                {
                    "loss": [floor.loss * each for each in unit["loss"]],
                    "grad_norm": [floor.grad_norm * each for each in of_norm],
                }
            )
        return _by_step(of_seeds)

    def _compared(self, found: Sequence[tuple[Seed, Training]]) -> Compared:
        losses = [
            abs(own - other)
            for seed, each in found
            for own, other in zip(each.loss, seed.reference.loss, strict=False)
        ]
        norms = [
            abs(own - other) / (abs(other) or 1.0)
            for seed, each in found
            for own, other in zip(each.grad_norm, seed.reference.grad_norm, strict=False)
        ]
        draws = [seed.draw(each) for seed, each in found]
        floor = self.floor(len(found))
        noise = distance_of(draws).over(floor)
        return Compared(
            trainings=[each for _, each in found],
            mean_loss=sum(losses) / len(losses),
            max_loss=max(losses),
            max_grad_norm=max(norms),
            noise=noise,
            logged=_logged(found),
            departure=self._departure(found, floor, noise),
        )

    def _departure(self, found: Sequence[tuple[Seed, Training]], floor: Limit, noise: Limit) -> str | None:
        """Where the mean over steps is beyond the floor, so is a step of a seed: the first one."""
        beyond = {name: getattr(floor, name) if getattr(noise, name) > 1 else math.inf for name in NAMES}
        for seed, each in found:
            draw = seed.draw(each)
            departure = first_departure(each, draw.centre, Limit(**beyond).times(draw.widening))
            if departure is not None:
                return departure if len(self.seeds) == 1 else f"seed {each.seed}, {departure}"
        return None


def _logged(found: Sequence[tuple[Seed, Training]]) -> tuple[float, float] | None:
    apart = [each for seed, training in found for each in _logged_apart(seed, training)]
    return (sum(apart) / len(apart), max(apart)) if apart else None


def _logged_apart(seed: Seed, found: Training) -> list[float]:
    """Of every step, what a stack logs against what it logs of data parallelism."""
    bases = (
        each.logged_loss
        for each in seed.others
        if each.setting("strategy") == seed.reference.setting("strategy")
        and each.setting("trainer") == found.setting("trainer")
        and each is not found
    )
    base = next((each for each in bases if each), None)
    if base is None or not found.logged_loss:
        return []
    pairs = zip(found.logged_loss, base, strict=False)
    return [abs(own - other) for own, other in pairs if own is not None and other is not None]


def _by_step(seeds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """By signal and step the root mean square over seeds."""
    return {
        name: [
            math.sqrt(sum(x * x for x in each) / len(each))
            for each in zip(*(seed[name] for seed in seeds), strict=False)
        ]
        for name in NAMES
    }


def comparisons(archive: Archive) -> list[Comparison]:
    """Those of the records of EXPERIMENT.

    Where the reference did not end well a control takes its place; without either a work is left out.
    """
    rows = archive.frame[archive.frame["experiment"] == EXPERIMENT]
    columns = [rows[name].astype("object").where(rows[name].notna(), None) for name in MADE_WITH.values()]
    origins = [dict(zip(MADE_WITH, each, strict=True)) for each in zip(*columns, strict=True)]
    return [*_comparisons(map(_training, map(archive.record, rows.index), origins))]


def _comparisons(trainings: Iterable[Training]) -> Iterator[Comparison]:
    alike: dict[str, list[Training]] = {}
    for training in trainings:
        alike.setdefault(json.dumps(training.work, sort_keys=True), []).append(training)
    told = _telling([group[0].work for group in alike.values()])
    for group in alike.values():
        seeds = [*_seeds(group)]
        if seeds:
            yield Comparison(seeds, told)


def _seeds(group: Sequence[Training]) -> Iterator[Seed]:
    """Those of one work, by number; without any of which neither reference nor control ended well."""
    for number in sorted({each.seed for each in group}):
        alike = [each for each in group if each.seed == number]
        plain = [each for each in alike if each.role in (Role.REFERENCE, Role.CONTROL) and each.is_ok]
        if plain:
            reference = min(plain, key=lambda each: each.role != Role.REFERENCE)
            yield Seed(reference, [each for each in alike if each is not reference])


def _telling(works: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The settings that, beside TOLD, tell these works apart; none that differs only where another does."""
    keys, told_apart = [*TOLD], 0
    for key in (TOLD[-1], *dict.fromkeys(key for work in works for key in work)):
        distinct = len({json.dumps([work.get(each) for each in (*keys, key)]) for work in works})
        if told_apart and distinct > told_apart:
            keys.append(key)
        told_apart = max(told_apart, distinct)
    return tuple(keys[len(TOLD) :])


def _training(record: Record, origin: Mapping[str, str | None]) -> Training:
    losses = record.losses
    signals = None if losses is None else signals_of(losses)
    if losses is None or signals is None or not all(map(math.isfinite, (*signals.loss, *signals.grad_norm))):
        return Training(record, origin)
    return Training(record, origin, signals.loss, signals.grad_norm, losses.logged_loss)
