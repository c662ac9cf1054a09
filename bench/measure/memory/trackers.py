"""Trackers of peak tensor memory by phase of the step, from CUDA's allocator or by counting CPU storages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common.deferred_errors import DeferredErrors
from bench.measure.memory.live_blocks import reachable_objects
from bench.ranks.log import StepPhase


class PhaseBytes:
    """Growth of memory in each phase of a step; the largest growth if a phase runs several times."""

    def __init__(self) -> None:
        self.peak_bytes: Counter[str] = Counter()
        """Peak of each phase above the bytes live at its start."""
        self.saved_bytes: Counter[str] = Counter()
        """Bytes live at the end of each phase less those at its start."""
        self._start_bytes = 0

    def end(self, name: str | None, peak_bytes: int, live_bytes: int) -> None:
        """Record a phase that ends, and begin the next.

        Args:
            name: Phase that ends; None for the time between phases.
            peak_bytes: Peak bytes within the phase, including those live at its start.
            live_bytes: Bytes that are live now.
        """
        if name is not None:
            self.peak_bytes[name] = max(self.peak_bytes[name], peak_bytes - self._start_bytes)
            self.saved_bytes[name] = max(self.saved_bytes[name], live_bytes - self._start_bytes)
        self._start_bytes = live_bytes


class CudaTracker:
    """Peaks of CUDA's allocator, read and reset whenever a phase ends, without a synchronisation."""

    def __init__(self, device: torch.device, phase: StepPhase) -> None:
        self.device = device
        self.phase = phase
        self.peak_bytes = 0
        self.peak_reserved_bytes = 0
        self.peak_phase: str | None = None
        """Phase with the largest peak; the time outside of phases is left out."""
        self._peak_phase_bytes = 0
        self.phases = PhaseBytes()

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.phases.end(None, 0, torch.cuda.memory_allocated(self.device))
        self.phase.on_change = self.record
        return self

    def __exit__(self, *_: object) -> None:
        self.record(self.phase.name)
        self.phase.on_change = None

    def record(self, phase: str | None) -> None:
        """Record the peaks since the last call as peaks of `phase`, or of no phase if it is None."""
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        if phase is not None and peak_bytes > self._peak_phase_bytes:
            self._peak_phase_bytes, self.peak_phase = peak_bytes, phase
        self.phases.end(phase, peak_bytes, torch.cuda.memory_allocated(self.device))
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live CPU tensors.

    The sum first reached `peak_bytes` in `peak_phase`. The mode counts the storages that Python can reach on
    entry and those that operators read or write. It reads their sizes at every operator, because FSDP2
    empties storages without freeing them. It does not count memory that a kernel allocates and frees itself.
    """

    def __init__(self, phase: StepPhase | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = phase or StepPhase()
        self.errors = DeferredErrors()
        self._live: set[ref[torch.UntypedStorage]] = set()
        """References to live storages. A WeakSet would not do: iterating it runs Python code, which
        `watch_modules` would record in the first step."""
        self.peak_bytes = 0
        self.peak_phase: str | None = None
        self.phases = PhaseBytes()
        self._phase_name: str | None = None
        self._phase_peak_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code stays compiled; otherwise torch would run it by operators."""
        return True

    def __enter__(self) -> Self:
        self._count(item for item in reachable_objects() if type(item) in {Tensor, torch.nn.Parameter})
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
            return NotImplemented  # DTensor then calls its operators on local tensors, which this mode sees
        with self.errors:
            if self.phase.name != self._phase_name:
                self._next_phase()
        result = func(*args, **(kwargs or {}))
        with self.errors:
            self._count(_tensors_in((result, args)))
        return result

    def _count(self, tensors: Iterable[Tensor]) -> None:
        """Add the storages of CPU tensors to the live ones, and update the peaks."""
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self._live.add(ref(tensor.untyped_storage(), self._live.discard))
        live_bytes = self._live_bytes()
        self._phase_peak_bytes = max(self._phase_peak_bytes, live_bytes)
        if live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_phase = live_bytes, self.phase.name

    def _next_phase(self) -> None:
        """End the recorded phase and begin the step's current one."""
        live_bytes = self._live_bytes()
        self.phases.end(self._phase_name, self._phase_peak_bytes, live_bytes)
        self._phase_name, self._phase_peak_bytes = self.phase.name, live_bytes

    def _live_bytes(self) -> int:
        # The set is copied first: a storage that is freed meanwhile removes its reference from it.
        storages = [storage for reference in [*self._live] if (storage := reference()) is not None]
        return sum(map(torch.UntypedStorage.nbytes, storages))


def _tensors_in(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, tuple | list):
        for part in nested:
            yield from _tensors_in(part)
