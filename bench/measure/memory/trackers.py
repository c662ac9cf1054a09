"""Peaks of tensor memory by phase of the step: CUDA keeps them itself, on a CPU storages are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common.kept_errors import KeptErrors
from bench.measure.memory.live_blocks import reachable_objects
from bench.ranks.log import StepPhase


class PhaseBytes:
    """Bytes by phase; of a phase that comes several times the most."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        """Its peak, less what was there at its start."""
        self.kept: Counter[str] = Counter()
        """What was there at its end, less what was there at its start."""
        self._start_bytes = 0

    def end(self, name: str | None, peak_bytes: int, live_bytes: int) -> None:
        """A phase ends, and another begins with what is live; None is what lies between phases."""
        if name is not None:
            self.taken[name] = max(self.taken[name], peak_bytes - self._start_bytes)
            self.kept[name] = max(self.kept[name], live_bytes - self._start_bytes)
        self._start_bytes = live_bytes


class CudaTracker:
    """CUDA's own peaks, read and set back whenever a part of the step ends; waits for nothing."""

    def __init__(self, device: torch.device, phase: StepPhase) -> None:
        self.device = device
        self.phase = phase
        self.peak_bytes = 0
        self.peak_reserved_bytes = 0
        self._phase_bytes = 0
        self.peak_phase: str | None = None
        self.phases = PhaseBytes()

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.phases.end(None, 0, torch.cuda.memory_allocated(self.device))
        self.phase.on_change = self.note
        return self

    def __exit__(self, *_: object) -> None:
        self.note(self.phase.name)
        self.phase.on_change = None

    def note(self, phase: str | None) -> None:
        """Take in the peaks since the last time, reached in `phase`."""
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        if phase is not None and peak_bytes > self._phase_bytes:
            self._phase_bytes, self.peak_phase = peak_bytes, phase
        self.phases.end(phase, peak_bytes, torch.cuda.memory_allocated(self.device))
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)


class AllocationTracker(TorchDispatchMode):
    """While it is on, `peak_bytes` grows to the most bytes that tensors held at once, first in `peak_phase`.

    Counted are the storages that Python can reach at the start and those that operators touch; sizes are
    read anew each time, because FSDP2 empties storages without freeing them. Not counted: what a kernel
    takes and gives back within itself.
    """

    def __init__(self, phase: StepPhase | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = phase or StepPhase()
        self.errors = KeptErrors()
        self._live: set[ref[torch.UntypedStorage]] = set()
        """No WeakSet: to go through it is Python, which `watch_modules` sees in the first step, each time."""
        self.peak_bytes = 0
        self.peak_phase: str | None = None
        self.phases = PhaseBytes()
        self._phase_name: str | None = None
        self._phase_peak_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled: under any other mode torch runs it operator by operator."""
        return True

    def __enter__(self) -> Self:
        self._note(each for each in reachable_objects() if type(each) in {Tensor, torch.nn.Parameter})
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._next_phase()
        self.errors.raise_first()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type[Any]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors come by one by one
        with self.errors:
            if self.phase.name != self._phase_name:
                self._next_phase()
        result = func(*args, **(kwargs or {}))
        with self.errors:
            self._note(_tensors_in((result, args)))
        return result

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self._live.add(ref(tensor.untyped_storage(), self._live.discard))
        live_bytes = self._live_bytes()
        self._phase_peak_bytes = max(self._phase_peak_bytes, live_bytes)
        if live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_phase = live_bytes, self.phase.name

    def _next_phase(self) -> None:
        live_bytes = self._live_bytes()
        self.phases.end(self._phase_name, self._phase_peak_bytes, live_bytes)
        self._phase_name, self._phase_peak_bytes = self.phase.name, live_bytes

    def _live_bytes(self) -> int:
        # Copied at once: storages that end meanwhile leave the set.
        found = [storage for each in [*self._live] if (storage := each()) is not None]
        return sum(map(torch.UntypedStorage.nbytes, found))


def _tensors_in(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, tuple | list):
        for part in nested:
            yield from _tensors_in(part)
