"""For which kernels of the records there are likely faster ones on their GPUs."""

from __future__ import annotations

from analysis.read.archive import Archive
from analysis.read.load import hardware_facts
from bench.cost.newer_kernels import newer_kernel_lines


def kernel_lines(archive: Archive) -> list[str]:
    """In a line each; a GPU that no file describes is as new as the records' environment says."""
    known = hardware_facts("compute_capability")
    told = [float(each) for found in archive.environments for each in found.get("gpu_capabilities") or ()]
    on_gpus = archive.frame[archive.frame["cluster.device"].eq("cuda")]
    pairs = on_gpus[["kernel", "hardware"]].drop_duplicates().itertuples(index=False)
    return newer_kernel_lines(
        {(str(kernel), known.get(str(name), max(told, default=None))) for kernel, name in pairs}
    )
