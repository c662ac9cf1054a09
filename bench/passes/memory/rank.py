"""Peak memory of a rank, over its whole life and in steady state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bench.passes.facts import of_one
from bench.passes.memory.peaks import MemoryWatch
from bench.passes.memory.section import Memory
from bench.passes.rank_pass import Measurement, RankPass
from bench.ranks.snapshot import keep_history, snapshot_path, write_snapshot


class MemoryPass(RankPass):
    def __init__(self, measurement: Measurement) -> None:
        super().__init__(measurement)
        self.peaks = MemoryWatch(measurement.device, measurement.log.step)
        self.offloaded_activation_bytes: int | None = None

    def around_building(self) -> AbstractContextManager[Any]:
        if self.measurement.measure.memory_snapshot:
            keep_history()
        return self.peaks.life

    def around_first_step(self) -> AbstractContextManager[Any]:
        return self.peaks.life

    def around_window(self) -> AbstractContextManager[Any]:
        return self.peaks.window()

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        offload = self.measurement.subject.activation_offload
        before = offload.packed_bytes if offload else 0
        with self.peaks.steady:
            yield
        if offload:
            self.offloaded_activation_bytes = offload.packed_bytes - before

    def before_steps(self) -> None:
        self.allocator_settings = _allocator_settings(self.measurement.device)

    def part(self) -> Memory:
        peaks = self.peaks.read(self.measurement.log.limit_base_bytes)
        trainer = self.measurement.subject.trainer
        return replace(
            peaks,
            allocator_settings=self.allocator_settings,
            offloaded_activation_bytes=of_one(self.offloaded_activation_bytes),
            offloaded_optimizer_bytes=of_one(trainer.engine.offloaded_bytes() if trainer else None),
            snapshot=of_one(self._snapshot()),
        )

    def _snapshot(self) -> str | None:
        folder = self.measurement.folder
        if folder is None or not self.measurement.measure.memory_snapshot:
            return None
        return write_snapshot(snapshot_path(folder, dist.get_rank()))


def _allocator_settings(device: torch.device) -> dict[str, str] | None:
    """What CUDA's allocator says that it runs with, for the record; None on a CPU."""
    if device.type != "cuda":
        return None
    backend = torch.cuda.memory.get_allocator_backend()
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {}) if backend == "native" else {}
    return {"backend": backend, **{name: str(value) for name, value in settings.items()}}


PASS = MemoryPass
