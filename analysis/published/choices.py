"""Which choice of this project is meant by a name in a publication."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Words = Mapping[str, str | int | float | bool]
"""Values by their keys of the command line."""

MODELS: Mapping[str, str] = {
    "LLaMA 7B": "llama2_7b",
    "Llama-2-7B": "llama2_7b",
    "Llama-3.1-8B": "llama3_1_8b",
    "Llama-3.1-8B-Instruct": "llama3_1_8b",
    "Llama2-7B": "llama2_7b",
    "Llama3-8B": "llama3_1_8b",
    "Qwen3-0.6B": "qwen3_0_6b",
    "Qwen3-14B": "qwen3_14b",
    "Qwen3-32B": "qwen3_32b",
    "Qwen3-4B": "qwen3_4b",
    "Qwen3-4B (implied, not restated)": "qwen3_4b",
    "Qwen3-8B": "qwen3_8b",
}
"""The first Llamas have the sizes of the second, Llama 3 those of 3.1."""

ATTENTION_ALONE = re.compile(
    r"attention op only: (?P<heads>\d+)(?: Q)? heads,(?: (?P<kv_heads>\d+) KV heads,)?"
    r" head_dim (?P<head_dim>\d+)(?:, GQA group (?P<group>\d+))?"
)
CARRIER = "llama3_1_8b"
"""The model whose layer an attention of other heads stands in; nothing else of it is read."""

DEVICES: Mapping[tuple[str, float | None], str] = {
    ("A100", 40.0): "a100_40gb",
    ("A100", 80.0): "a100_80gb",
    ("A100-SXM4", 80.0): "a100_80gb",
    ("B200", 180.0): "b200",
    ("H100", 80.0): "h100_80gb",
    ("H100", None): "h100_80gb",
    ("H200", 141.0): "h200_141gb",
    ("L20", 48.0): "l20",
}
"""By the GPU's name and its memory in GB; of an H100 that states none the most common one is taken."""

PCIE: Mapping[str, str] = {"a100_40gb": "a100_pcie_40gb", "a100_80gb": "a100_pcie_80gb"}
"""The same GPUs where a source says that PCIe joins them."""

NETWORK = re.compile(r"EFA|RDMA|InfiniBand|IB\b|Gb/s|nodes|DGX", re.IGNORECASE)
"""Words that say what joins nodes."""

KERNELS: Sequence[tuple[str, str]] = (
    (r"cudnn", "cudnn"),
    (r"fa3|flash_attention_3", "flash_attn_3"),
    (r"flash_attention_2|flash_attn|flashattention", "flash_attn_2"),
    (r"sdpa", "torch_flash"),
)
"""The first pattern that is found names the kernel."""

DTYPES: Sequence[tuple[str, str]] = ((r"fp8|float8|fp32", ""), (r"^bf16", "bf16"), (r"^fp16", "fp16"))
"""The first pattern that is found names the dtype; an empty one that this project has no such training."""

ULYSSES: Sequence[Words] = ({"strategy": "deepspeed_ulysses"}, {"strategy": "ulysses"})
OUR_ULYSSES: Sequence[Words] = (*ULYSSES[::-1],)
TORCH_CP: Sequence[Words] = ({"strategy": "torch_cp"},)


def _rings(layout: str) -> Sequence[Words]:
    return tuple({"strategy": name, "layout": layout} for name in ("ring", "ring_flash_attn"))


SYSTEMS: Mapping[str, Sequence[Words]] = {
    "alst-1gpu": ({"strategy": "local"},),
    "distflashattn": ({"strategy": "distflash_attn", "strategy.checkpoints": "attention_output"},),
    "dp-baseline": ({"strategy": "local"},),
    "llama3-allgather": ({"strategy": "ring_flash_attn_llama3"},),
    "ring": _rings("contiguous"),
    "ring-allgather": TORCH_CP,
    "stripe-ring": _rings("striped"),
    "ulysses": ULYSSES,
    "upipe": ({"strategy": "ulysses_chunked"},),
    "usp": ({"strategy": "usp"},),
    "zigzag-ring": _rings("zigzag"),
}
"""The strategies that are the same method: the first is what is computed, any may have been measured."""

SYSTEMS_OF_GROUP: Mapping[tuple[str, str], Sequence[Words]] = {
    ("community", "ring"): _rings("zigzag"),
    ("magiattention", "ring"): _rings("zigzag"),
    ("magiattention", "ring-allgather"): (),
    ("magiattention", "ulysses"): OUR_ULYSSES,
    ("nvidia-cp", "ring"): _rings("zigzag"),
    ("torchtitan", "ring"): TORCH_CP,
    ("trl-ring", "ring"): TORCH_CP,
    ("usp", "ulysses"): OUR_ULYSSES,
}
"""Where a group of claims means something else by the name: Megatron's ring and EasyContext's are balanced,
torch's is called a ring by those who use it. Megatron's all-gather is not torch's, and not here."""


def strategies(group: str, system: str) -> Sequence[Words]:
    """The strategies that are a system; empty where this project has none."""
    return SYSTEMS_OF_GROUP.get((group, system), SYSTEMS.get(system, ()))


def first_match(patterns: Sequence[tuple[str, str]], text: str) -> str | None:
    """What stands beside the first pattern that is found in the text."""
    return next((word for pattern, word in patterns if re.search(pattern, text, re.IGNORECASE)), None)


def heads(model: str) -> Words | None:
    """The heads of an attention that is claimed for alone; None for a whole model."""
    found = ATTENTION_ALONE.match(model)
    if found is None:
        return None
    count = int(found["heads"])
    kv_heads = int(found["kv_heads"] or count // int(found["group"] or 1))
    return {
        "model.num_heads": count,
        "model.num_kv_heads": kv_heads,
        "model.head_dim": int(found["head_dim"]),
    }
