"""Compares the losses and gradient norms of `experiment=loss_equivalence` with data parallelism.

For each workload and seed the experiment trains with data parallelism (the reference), with controls, which
compute the same in another way, with strategies, and with mistakes made on purpose. The reference and its
controls are the equivalent trainings. The largest distance from their mean that rounding explains is the
noise floor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from analysis.cells.comparison import FREE_PREFIXES, FREE_SETTINGS
from analysis.labels import count_label
from analysis.read.archive import ORIGIN_COLUMNS, Archive
from bench.common.labels import length_label
from bench.record.record import Record, Role, Status
from bench.record.trajectory_noise import (
    ControlledTraining,
    Deviation,
    TrajectoryNoise,
    deviation_of,
    first_departure,
    signals_of,
)

LOSS_EQUIVALENCE = "loss_equivalence"
CONTROLLED = ("data.rank_order", "inject_fault")
"""Settings that only controls and injected mistakes set to other values."""
SEQUENCE_COUNTS = ("batch", "dp_replicate", "dp_shard", "grad_accum")
"""Settings whose product is the number of sequences in a step."""
NAMING_KEYS = ("seq_len", "model", "dtype", "engine", "optimizer")
"""Settings in the name of every comparison. Further settings follow where comparisons differ in them."""
NATIVE = "native"
"""Trainer with the loop of this project."""


@dataclass(frozen=True, slots=True)
class Training:
    """Losses and gradient norms of one record; both empty if it has none, or one that is not finite."""

    record: Record
    origin: Mapping[str, str | None]
    """Code, torch and device that made the record, by the keys of ORIGIN_COLUMNS."""
    loss: Sequence[float] = field(default=())
    """Loss of each step: the sum of token losses over the number of valid tokens."""
    grad_norm: Sequence[float] = field(default=())
    logged_loss: Sequence[float | None] | None = None
    """Loss that a training stack logs for each step; None with the native loop."""

    @property
    def role(self) -> Role:
        return self.record.role

    @property
    def is_ok(self) -> bool:
        """Whether the training finished, passed every check, and has only finite losses and norms."""
        return self.record.status is Status.OK and bool(self.loss)

    @property
    def work(self) -> dict[str, Any]:
        """Settings, origin and provenance in which trainings of the same workload agree, without the seed."""
        config = self.record.config
        free = FREE_SETTINGS.union(CONTROLLED)
        settings = {
            key: value for key, value in config.items() if not (key in free or key.startswith(FREE_PREFIXES))
        }
        sequences = math.prod(config.get(key) or 1 for key in SEQUENCE_COUNTS)
        return {**settings, "sequences": sequences, **self.origin, "provenance": self.record.provenance}

    @property
    def seed(self) -> int:
        return int(self.setting("seed") or 0)

    @property
    def method_key(self) -> str:
        """Role, repeat and free settings as JSON, equal for trainings that differ only in the seed."""
        free, prefixes = FREE_SETTINGS.union(CONTROLLED) - {"seed"}, tuple({*FREE_PREFIXES} - {"measure."})
        config = self.record.config.items()
        chosen = {key: value for key, value in config if key in free or key.startswith(prefixes)}
        return json.dumps([self.role, self.record.repeat, chosen], sort_keys=True)

    @property
    def label(self) -> str:
        """`ring zigzag`, `ulysses contiguous under trl`, `mistake: mask_off_by_one` or `control: ...`."""
        if self.role == Role.INJECTED_FAULT:
            return f"mistake: {self.setting('inject_fault')}"
        words, trainer = f"{self.setting('strategy')} {self.setting('layout')}", self.setting("trainer")
        if self.role == Role.CONTROL:
            ranks = count_label(int(self.setting("cluster.world_size")), "rank")
            words = f"control: {ranks}, {self.setting('kernel')} kernel"
            words += ", data in reverse rank order" if self.setting("data.rank_order") == "reversed" else ""
        return words if trainer == NATIVE else f"{words} under {trainer}"

    def setting(self, key: str) -> Any:
        """Return a value of the record's configuration; None where it has no such setting."""
        return self.record.config.get(key)


@dataclass(frozen=True)
class SeedTrainings:
    """Trainings of one workload with one seed: all have the same initial weights and the same data."""

    reference: Training
    others: Sequence[Training]

    @cached_property
    def equivalent(self) -> list[Training]:
        """The reference and the controls that are ok; a wrong control would raise the noise floor."""
        controls = [other for other in self.others if other.role == Role.CONTROL and other.is_ok]
        return [self.reference, *controls]

    def with_controls(self, training: Training) -> ControlledTraining:
        """Return a training of this seed with all equivalent trainings but itself, as its controls."""
        return ControlledTraining(training, [other for other in self.equivalent if other is not training])


class TrainingOfSeed(NamedTuple):
    """One training, and all trainings of its workload and seed."""

    seed_trainings: SeedTrainings
    training: Training

    @property
    def with_controls(self) -> ControlledTraining:
        """The training with its controls."""
        return self.seed_trainings.with_controls(self.training)


class LoggedDifference(NamedTuple):
    """Difference between losses that one training stack logs with a strategy and with data parallelism."""

    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class ComparedTraining:
    """Trainings that differ only in their seed, compared with the reference and the noise of each seed."""

    trainings: Sequence[Training]
    """One training per seed."""
    mean_loss_difference: float
    """Mean over steps and seeds of the absolute difference of the loss from the reference's, in nats."""
    max_loss_difference: float
    max_norm_difference: float
    """Largest difference of the gradient norm from the reference's, relative to the reference's."""
    distance: Deviation
    """Distance from the mean of the equivalent trainings, in multiples of the noise floor."""
    logged: LoggedDifference | None
    """Difference of logged losses in nats; None where the training stack logs no loss, or did not train with
    data parallelism."""
    departure: str | None
    """Sentence on the first step beyond the floor; None where the mean over all steps is within the floor."""

    @property
    def training(self) -> Training:
        """The training that represents all seeds: the first that failed, else the first."""
        return next((training for training in self.trainings if not training.is_ok), self.trainings[0])

    @property
    def is_within(self) -> bool:
        """Whether the distances of loss and gradient norm are within the noise floor."""
        return self.largest_distance <= 1

    @property
    def largest_distance(self) -> float:
        """Larger one of the distances of loss and gradient norm, in multiples of the noise floor."""
        return max(self.distance.loss, self.distance.grad_norm)

    @property
    def is_as_expected(self) -> bool:
        """Whether the training is what its role promises.

        An injected mistake must be beyond the noise floor. Any other training must be ok and, unless it is a
        control, within the floor.
        """
        if self.training.role == Role.INJECTED_FAULT:
            return not self.is_within
        return self.training.is_ok and (self.training.role == Role.CONTROL or self.is_within)


@dataclass(frozen=True)
class LossComparison:
    """Trainings of one workload with all seeds, compared with data parallelism."""

    seeds: Sequence[SeedTrainings]
    more_naming_keys: tuple[str, ...] = ()
    """Settings in the name of the comparison after NAMING_KEYS, because other comparisons differ in them."""

    @property
    def reference(self) -> Training:
        """The reference of the first seed."""
        return self.seeds[0].reference

    @cached_property
    def noise(self) -> TrajectoryNoise:
        """Noise of the equivalent trainings of all seeds."""
        return TrajectoryNoise([seed.equivalent for seed in self.seeds])

    @property
    def other_trainings(self) -> list[Training]:
        """All trainings of all seeds but the references."""
        return [training for seed in self.seeds for training in seed.others]

    @property
    def control_counts(self) -> list[int]:
        """Number of controls of each seed that are ok."""
        return [len(seed.equivalent) - 1 for seed in self.seeds]

    def floor(self, seeds: int | None = None) -> Deviation:
        """Return the noise floor for a training with this number of seeds; None stands for all seeds.

        If all trainings are equivalent, any of the strategies' trainings is beyond the floor in at most
        FALSE_ALARMS of comparisons.
        """
        compared = {
            other.method_key for other in self.other_trainings if other.role == Role.CELL and other.loss
        }
        return self.noise.floor(seeds or len(self.seeds), len(compared))

    @cached_property
    def rows(self) -> list[ComparedTraining]:
        """Compared trainings: strategies first, then references, controls and mistakes.

        Trainings without losses or without controls are left out.
        """
        order = (Role.CELL, Role.REFERENCE, Role.CONTROL, Role.INJECTED_FAULT)
        methods: dict[str, list[TrainingOfSeed]] = {}
        for seed in self.seeds:
            for training in seed.others:
                if training.loss and seed.with_controls(training).controls:
                    methods.setdefault(training.method_key, []).append(TrainingOfSeed(seed, training))
        rows = [self._compared_training(pairs) for pairs in methods.values()]
        return sorted(rows, key=lambda row: order.index(row.training.role))

    @property
    def steps(self) -> int:
        """Number of steps that the references and every compared strategy ran."""
        strategies = [other for other in self.other_trainings if other.role == Role.CELL and other.loss]
        references = [seed.reference for seed in self.seeds]
        return min(len(training.loss) for training in (*references, *strategies))

    @property
    def fall(self) -> float:
        """Smallest fall of the reference loss from the first to the last step over all seeds, in nats."""
        return min(seed.reference.loss[0] - seed.reference.loss[-1] for seed in self.seeds)

    @property
    def name(self) -> str:
        """`1k, qwen3_nano, fp32, zero3, adamw`, with the number of seeds where there are several."""
        seq_len, *others = (self.reference.setting(key) for key in NAMING_KEYS)
        more = [f"{key}={self.reference.work[key]}" for key in self.more_naming_keys]
        more += [f"{len(self.seeds)} seeds"] if len(self.seeds) > 1 else []
        return ", ".join([length_label(int(seq_len)), *map(str, others), *more])

    def _compared_training(self, pairs: Sequence[TrainingOfSeed]) -> ComparedTraining:
        """Compare trainings that differ only in their seed with the reference and the noise of each seed."""
        losses = [
            abs(loss - reference_loss)
            for seed, training in pairs
            for loss, reference_loss in zip(training.loss, seed.reference.loss, strict=False)
        ]
        norms = [
            abs(norm - reference_norm) / (abs(reference_norm) or 1.0)
            for seed, training in pairs
            for norm, reference_norm in zip(training.grad_norm, seed.reference.grad_norm, strict=False)
        ]
        floor = self.floor(len(pairs))
        distance = deviation_of([pair.with_controls for pair in pairs]).divided_by(floor)
        return ComparedTraining(
            trainings=[pair.training for pair in pairs],
            mean_loss_difference=sum(losses) / len(losses),
            max_loss_difference=max(losses),
            max_norm_difference=max(norms),
            distance=distance,
            logged=_logged_difference(pairs),
            departure=self._departure(pairs, floor, distance),
        )

    def _departure(
        self, pairs: Sequence[TrainingOfSeed], floor: Deviation, distance: Deviation
    ) -> str | None:
        """Return a sentence on the first step beyond the floor, in the first seed that has one.

        None where the mean over all steps is within the floor. If it is not, at least one step is beyond.
        """
        limit = Deviation(
            loss=floor.loss if distance.loss > 1 else math.inf,
            grad_norm=floor.grad_norm if distance.grad_norm > 1 else math.inf,
        )
        for pair in pairs:
            controlled = pair.with_controls
            departure = first_departure(pair.training, controlled.centre, limit.times(controlled.widening))
            if departure is not None:
                return departure if len(self.seeds) == 1 else f"seed {pair.training.seed}, {departure}"
        return None


def _logged_difference(pairs: Sequence[TrainingOfSeed]) -> LoggedDifference | None:
    """Return how the losses that a training stack logs differ from those that it logs with data parallelism.

    The difference is over all steps and seeds, in nats. None where the stack logs no loss, or did not train
    with data parallelism.
    """
    differences = []
    for seed, training in pairs:
        base_key = seed.reference.setting("strategy"), training.setting("trainer")
        bases = (
            other.logged_loss
            for other in seed.others
            if (other.setting("strategy"), other.setting("trainer")) == base_key
            and other is not training
            and other.logged_loss
        )
        logged = zip(training.logged_loss or (), next(bases, ()), strict=False)
        differences += [abs(loss - base) for loss, base in logged if loss is not None and base is not None]
    if not differences:
        return None
    return LoggedDifference(sum(differences) / len(differences), max(differences))


def loss_comparisons(archive: Archive) -> list[LossComparison]:
    """Return a comparison for each workload among the records of `experiment=loss_equivalence`.

    Where a reference failed, a control takes its place. A workload in which both failed is left out.
    """
    rows = archive.frame[archive.frame["experiment"] == LOSS_EQUIVALENCE]
    columns = [
        rows[name].astype("object").where(rows[name].notna(), None) for name in ORIGIN_COLUMNS.values()
    ]
    groups: dict[str, list[Training]] = {}
    for row, *origin in zip(rows.index, *columns, strict=True):
        training = _training(archive.record(row), dict(zip(ORIGIN_COLUMNS, origin, strict=True)))
        groups.setdefault(json.dumps(training.work, sort_keys=True), []).append(training)
    keys = _distinguishing_keys([group[0].work for group in groups.values()])
    seeds_of_groups = ([*_seeds(group)] for group in groups.values())
    return [LossComparison(seeds, keys) for seeds in seeds_of_groups if seeds]


def _seeds(group: Sequence[Training]) -> Iterator[SeedTrainings]:
    """Yield the seeds of one workload, ascending, without those whose reference and controls failed."""
    for number in sorted({training.seed for training in group}):
        trainings = [training for training in group if training.seed == number]
        candidates = [
            training
            for training in trainings
            if training.role in (Role.REFERENCE, Role.CONTROL) and training.is_ok
        ]
        if candidates:
            reference = min(candidates, key=lambda training: training.role != Role.REFERENCE)
            yield SeedTrainings(reference, [other for other in trainings if other is not reference])


def _distinguishing_keys(works: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the settings besides NAMING_KEYS that are needed to distinguish these workloads."""
    keys, distinct_before = [*NAMING_KEYS], 0
    for key in (NAMING_KEYS[-1], *dict.fromkeys(key for work in works for key in work)):
        distinct = len({json.dumps([work.get(name) for name in (*keys, key)]) for work in works})
        if distinct_before and distinct > distinct_before:
            keys.append(key)
        distinct_before = max(distinct_before, distinct)
    return tuple(keys[len(NAMING_KEYS) :])


def _training(record: Record, origin: Mapping[str, str | None]) -> Training:
    """Return the training of a record, without losses if one of them or a gradient norm is not finite."""
    losses = record.losses
    signals = None if losses is None else signals_of(losses)
    if losses is None or signals is None or not all(map(math.isfinite, (*signals.loss, *signals.grad_norm))):
        return Training(record, origin)
    return Training(record, origin, signals.loss, signals.grad_norm, losses.logged_loss)
