"""What is known of a kernel without running it, and without torch: devices, dtypes, GPUs, whose package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.config import RunConfig
from bench.environment import installed

ANY_DTYPE = ("bf16", "fp16", "fp32", "fp64")
HALF = ("bf16", "fp16")
GENERATIONS: Mapping[int, str] = {9: "Hopper", 10: "Blackwell"}


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One kernel's facts."""

    name: str
    """Its key in the table and its file in `bench/attention/kernels/`."""
    dtypes: Mapping[str, tuple[str, ...]]
    """What it takes on each device; on others it does not run."""
    package: str | None = None
    """The distribution it comes from; None for torch."""
    install: str = ""
    """The command that installs the package."""
    capabilities: tuple[int, ...] = ()
    """Major compute capabilities that torch's adapters to the package accept; empty where not documented.

    A cell does not know the capability of its GPUs: legality can name them, only a rank can check them.
    """
    max_head_dim: int | None = None
    """The largest head it takes on a GPU; None where none is documented."""

    @property
    def gpus(self) -> str:
        """The GPUs it needs in words: "GPU", "Hopper GPU", "Hopper or Blackwell GPU"."""
        generations = " or ".join(GENERATIONS[major] for major in self.capabilities)
        return f"{generations} GPU".lstrip()

    @property
    def is_installed(self) -> bool:
        """Whether its package is installed, by its metadata: nothing is imported."""
        return self.package is None or installed(self.package) is not None

    def refusals(self, cell: RunConfig) -> list[str]:
        """Why this cell cannot run on this kernel, each with a way out; empty when it can."""
        device = cell.cluster.device
        if device not in self.dtypes:
            return [
                f"kernel={self.name} needs a {self.gpus}; take {_instead(cell)}, or run it with cluster=gpu"
            ]
        reasons = []
        if cell.dtype not in self.dtypes[device]:
            reasons.append(
                f"dtype={cell.dtype} is not for kernel={self.name} on {device}; choose"
                f" dtype={' or '.join(self.dtypes[device])}, or {_instead(cell)}"
            )
        head_dim = cell.model.head_dim
        if device == "cuda" and self.max_head_dim is not None and head_dim > self.max_head_dim:
            reasons.append(
                f"model.head_dim={head_dim} is not for kernel={self.name}, which takes {self.max_head_dim} at"
                " most; choose kernel=math"
            )
        if not self.is_installed:
            reasons.append(
                f"kernel={self.name} needs the package {self.package} and a {self.gpus}; install it with:"
                f" {self.install}; or take {_instead(cell)}"
            )
        return reasons


KERNEL_FACTS: Mapping[str, KernelFacts] = {
    facts.name: facts
    for facts in (
        KernelFacts("torch_flash", {"cpu": ANY_DTYPE, "cuda": HALF}, max_head_dim=256),
        KernelFacts("math", {"cpu": ANY_DTYPE, "cuda": ANY_DTYPE}),
        KernelFacts("cudnn", {"cuda": HALF}),
        KernelFacts("flash_attn_2", {"cuda": HALF}, "flash-attn", "pip install flash-attn", max_head_dim=256),
        KernelFacts(
            "flash_attn_3",
            {"cuda": HALF},
            "flash-attn-3",
            "python setup.py install, in the folder hopper of github.com/Dao-AILab/flash-attention",
            capabilities=(9,),
            max_head_dim=256,
        ),
        KernelFacts(
            "flash_attn_4", {"cuda": HALF}, "flash-attn-4", "pip install flash-attn-4", capabilities=(9, 10)
        ),
    )
}
DEFAULT_KERNEL = "torch_flash"


def _instead(cell: RunConfig) -> str:
    """The first kernel of the table that needs no package and takes the cell's device and dtype."""
    fits = (
        facts.name
        for facts in KERNEL_FACTS.values()
        if facts.package is None and cell.dtype in facts.dtypes.get(cell.cluster.device, ())
    )
    return f"kernel={next(fits)}"
