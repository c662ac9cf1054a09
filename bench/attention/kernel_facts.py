"""What is known of a kernel without running it, and without torch: devices, dtypes, GPUs, whose package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.common.environment import installed
from bench.config import Cell

ANY_DTYPE = ("bf16", "fp16", "fp32", "fp64")
HALF = ("bf16", "fp16")
"""Dtypes of flash-attn, and of packages that add up its gradients in float32: given float32, these add in
place to a buffer that the next block overwrites, as `.to(torch.float32)` is then no copy."""
HEAD_DIM_MULTIPLE = 8
"""Fused kernels load 16 bytes at a time; torch's attention pads heads, the operators below it refuse them."""
FLASH_ATTN = "flash_attn_2"
"""The kernel that ring-flash-attn, yunchang and FPDT were written for: the package flash-attn."""
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
    head_dim_multiple: int = HEAD_DIM_MULTIPLE
    """What the size of a head has to be a multiple of on a GPU."""

    @property
    def gpus(self) -> str:
        """The GPUs it needs in words: "GPU", "Hopper GPU", "Hopper or Blackwell GPU"."""
        generations = " or ".join(GENERATIONS[major] for major in self.capabilities)
        return f"{generations} GPU".lstrip()

    @property
    def is_installed(self) -> bool:
        """Whether its package is installed, by its metadata: nothing is imported."""
        return self.package is None or installed(self.package) is not None

    def takes_heads_of(self, cell: Cell) -> bool:
        """Whether its GPU code takes heads of the cell's size; on a CPU any are taken."""
        head_dim = cell.model.head_dim
        is_small = self.max_head_dim is None or head_dim <= self.max_head_dim
        return cell.cluster.device != "cuda" or (is_small and head_dim % self.head_dim_multiple == 0)

    def refusals(self, cell: Cell) -> list[str]:
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
        if not self.takes_heads_of(cell):
            most = "" if self.max_head_dim is None else f", {self.max_head_dim} at most"
            reasons.append(
                f"model.head_dim={cell.model.head_dim} is not for kernel={self.name}, which takes multiples"
                f" of {self.head_dim_multiple}{most}; choose {_instead(cell)}"
            )
        return reasons

    def package_refusals(self, cell: Cell) -> list[str]:
        """Why it cannot be imported here; empty when it can, and where the device rules it out anyway."""
        if self.is_installed or cell.cluster.device not in self.dtypes:
            return []
        needs = f"kernel={self.name} needs the package {self.package} and a {self.gpus}"
        return [f"{needs}; install it with: {self.install}; or take {_instead(cell)}"]


KERNEL_FACTS: Mapping[str, KernelFacts] = {
    facts.name: facts
    for facts in (
        KernelFacts("torch_flash", {"cpu": ANY_DTYPE, "cuda": HALF}, max_head_dim=256),
        KernelFacts("math", {"cpu": ANY_DTYPE, "cuda": ANY_DTYPE}, head_dim_multiple=1),
        KernelFacts("flash_blocks", {"cpu": ANY_DTYPE, "cuda": HALF}, max_head_dim=256),
        # Wider heads need a cuDNN after 9.22, and then a backward takes 256 but not 192 (sdp_utils.cpp).
        KernelFacts("cudnn", {"cuda": HALF}, max_head_dim=128),
        KernelFacts(FLASH_ATTN, {"cuda": HALF}, "flash-attn", "pip install flash-attn", max_head_dim=256),
        KernelFacts(
            "flash_attn_3",
            {"cuda": HALF},
            "flash-attn-3",
            "pip install flash-attn-3 --index-url https://download.pytorch.org/whl/cu130",
            capabilities=(9,),
            max_head_dim=256,
        ),
        KernelFacts(
            "flash_attn_4",
            {"cuda": HALF},
            "flash-attn-4",
            "pip install --pre 'flash-attn-4[cu13]'",
            capabilities=(9, 10),
        ),
    )
}
DEFAULT_KERNEL = "torch_flash"
"""What `kernel=auto` means, for every strategy and on every GPU: strategies are compared on one kernel.

It is FlashAttention-2, also on Hopper, where newer kernels take less time and so hide less communication:
their users see more of it exposed. `cudnn` needs no package either, takes fewer KV heads, returns the natural
LSE and is torch's own first choice on compute capability 9 and 10 after cuDNN 9.15. It stays a choice of the
user until these have passed on such a GPU and show it faster:
`pytest -m gpu tests/bench/attention/test_kernels.py tests/gpu/test_one_gpu.py -k "cudnn or torch_flash"` and
`python run_sweep.py -m strategy=local model=qwen3_0_6b seq_len=8k,32k kernel=torch_flash,cudnn`.
"""


def _instead(cell: Cell) -> str:
    """The first kernel of the table that needs no package and takes the cell's device, dtype and heads."""
    fits = (
        facts.name
        for facts in KERNEL_FACTS.values()
        if facts.package is None
        and cell.dtype in facts.dtypes.get(cell.cluster.device, ())
        and facts.takes_heads_of(cell)
    )
    return f"kernel={next(fits)}"
