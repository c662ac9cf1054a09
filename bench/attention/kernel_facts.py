"""Facts of kernels that are known without torch: devices, dtypes, head sizes, GPUs and packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.common.environment import installed_version
from bench.config import Cell

ANY_DTYPE = ("bf16", "fp16", "fp32", "fp64")
HALF = ("bf16", "fp16")
"""Dtypes of flash-attn, and of packages that sum its gradients in float32. With float32 inputs the sums of
these packages would be wrong, because `.to(torch.float32)` does not copy a float32 tensor: they would add to
a buffer that the next block overwrites."""
HEAD_DIM_MULTIPLE = 8
"""Number that the head size must be a multiple of, as fused kernels load 16 bytes at a time. torch's
`scaled_dot_product_attention` pads other heads, but the operators that our kernels call refuse them."""
FLASH_ATTN = "flash_attn_2"
"""Name of the kernel of the package flash-attn, for which ring-flash-attn, yunchang and FPDT were written."""
CUDNN = "cudnn"
FLASH_OPERATORS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
GENERATIONS: Mapping[int, str] = {9: "Hopper", 10: "Blackwell"}
"""GPU generation of a major compute capability."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Devices, dtypes and head sizes that a kernel takes, and the package that it comes from."""

    name: str
    """Key in the table of kernels, and the name of the module in `bench/attention/kernels/`."""
    dtypes: Mapping[str, tuple[str, ...]]
    """Dtypes that the kernel takes on each device type. On a device type without an entry it does not run."""
    package: str | None = None
    """Distribution that contains the kernel; None for torch."""
    install: str = ""
    """Command that installs the package."""
    capabilities: tuple[int, ...] = ()
    """Major compute capabilities that torch's adapters to the package accept; empty if none are documented.

    Messages name them, but only a rank can check them, as a cell does not know the capability of its GPUs.
    """
    max_head_dim: int | None = None
    """Largest head size on a GPU; None if no limit is documented."""
    head_dim_multiple: int = HEAD_DIM_MULTIPLE
    """Number that the head size must be a multiple of on a GPU."""
    sdpa_operators: tuple[str, ...] = ()
    """Operators of torch's `scaled_dot_product_attention` that the kernel calls, as torch.profiler names
    them."""

    @property
    def required_gpu(self) -> str:
        """Kind of GPU that the kernel needs, in words: "GPU", "Hopper GPU", "Hopper or Blackwell GPU"."""
        generations = " or ".join(GENERATIONS[major] for major in self.capabilities)
        return f"{generations} GPU".lstrip()

    @property
    def is_installed(self) -> bool:
        """Whether the package is installed. Its metadata says so; nothing is imported."""
        return self.package is None or installed_version(self.package) is not None

    def takes_heads_of(self, cell: Cell) -> bool:
        """Return whether the kernel takes the cell's head size. On a CPU every size is valid."""
        head_dim = cell.model.head_dim
        is_small = self.max_head_dim is None or head_dim <= self.max_head_dim
        return cell.cluster.device != "cuda" or (is_small and head_dim % self.head_dim_multiple == 0)

    def refusals(self, cell: Cell) -> list[str]:
        """Return the reasons why a cell cannot run on this kernel, each with a way out."""
        device = cell.cluster.device
        if device not in self.dtypes:
            way_out = f"choose {_alternative(cell)}, or run with cluster=gpu"
            return [f"kernel={self.name} needs a {self.required_gpu}; {way_out}"]
        reasons = []
        if cell.dtype not in self.dtypes[device]:
            reasons.append(
                f"dtype={cell.dtype} does not work with kernel={self.name} on {device}; choose"
                f" dtype={' or '.join(self.dtypes[device])}, or {_alternative(cell)}"
            )
        if not self.takes_heads_of(cell):
            limit = "" if self.max_head_dim is None else f" up to {self.max_head_dim}"
            reasons.append(
                f"model.head_dim={cell.model.head_dim} does not work with kernel={self.name}, which takes"
                f" multiples of {self.head_dim_multiple}{limit}; choose {_alternative(cell)}"
            )
        return reasons

    def package_refusals(self, cell: Cell) -> list[str]:
        """Return the reason why the package cannot be imported here.

        The list is empty if the package is installed, or if `refusals` already rules out the device.
        """
        if self.is_installed or cell.cluster.device not in self.dtypes:
            return []
        way_out = f"install it with: {self.install}; or choose {_alternative(cell)}"
        return [f"kernel={self.name} needs the package {self.package} and a {self.required_gpu}; {way_out}"]


KERNEL_FACTS: Mapping[str, KernelFacts] = {
    facts.name: facts
    for facts in (
        KernelFacts(
            "torch_flash", {"cpu": ANY_DTYPE, "cuda": HALF}, max_head_dim=256, sdpa_operators=FLASH_OPERATORS
        ),
        KernelFacts("math", {"cpu": ANY_DTYPE, "cuda": ANY_DTYPE}, head_dim_multiple=1),
        KernelFacts(
            "flash_blocks", {"cpu": ANY_DTYPE, "cuda": HALF}, max_head_dim=256, sdpa_operators=FLASH_OPERATORS
        ),
        # Larger heads need a cuDNN after 9.22, whose backward takes 256 but not 192 (sdp_utils.cpp).
        KernelFacts(
            CUDNN,
            {"cuda": HALF},
            max_head_dim=128,
            sdpa_operators=("aten::_scaled_dot_product_cudnn_attention",),
        ),
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
"""Kernel of `kernel=auto` where it is not CUDNN; on a GPU it is FlashAttention-2."""
CUDNN_CAPABILITIES = (9.0, 10.0, 10.3)
"""Compute capabilities on which `kernel=auto` is CUDNN, the first choice of torch's
`scaled_dot_product_attention` there (sdp_utils.cpp).

Its tests passed on one H100 (results/reference/h100). We have not compared speeds; a step of 1M tokens on 8
H100 took others 373 s with cuDNN and 606 s with FlashAttention-2 (huggingface/transformers#48324).
"""


def _alternative(cell: Cell) -> str:
    """Return `kernel=` and the first kernel of torch that takes the cell's device, dtype and heads."""
    fits = (
        facts.name
        for facts in KERNEL_FACTS.values()
        if facts.package is None
        and cell.dtype in facts.dtypes.get(cell.cluster.device, ())
        and facts.takes_heads_of(cell)
    )
    return f"kernel={next(fits)}"
