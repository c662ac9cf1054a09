"""Signatures of flash-attention's functions, from its sources, and packages with them that compute on a CPU.

Read from github.com/Dao-AILab/flash-attention; each name is followed by its parameters, those with a default
after the bar.
"""

import sys
from dataclasses import dataclass

import torch

from bench.attention.kernels import KERNELS, Packing, kernel_backward, kernel_forward
from bench.attention.packed import packed_backward, packed_forward


@dataclass(frozen=True)
class Source:
    module: str
    functions: dict[str, str]


FLASH_ATTN_2 = Source(
    # at 060c918 (v2.8.3); at 0251105 `_flash_attn_varlen_forward` also has num_splits, with a default
    "flash_attn.flash_attn_interface",
    {
        "_flash_attn_forward": "q k v dropout_p softmax_scale causal window_size_left window_size_right"
        " softcap alibi_slopes return_softmax |",
        "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal"
        " window_size_left window_size_right softcap alibi_slopes deterministic | rng_state",
        "_flash_attn_varlen_forward": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p"
        " softmax_scale causal | window_size_left window_size_right softcap alibi_slopes return_softmax"
        " block_table leftpad_k seqused_k zero_tensors",
        "_flash_attn_varlen_backward": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k"
        " max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap"
        " alibi_slopes deterministic | rng_state zero_tensors",
    },
)
FLASH_ATTN_2_PUBLIC = {
    "flash_attn_func": "q k v | dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    " return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k | dropout_p"
    " softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs block_table",
}
"""Differentiable functions of flash-attention 2, at 0053002."""
FLASH_ATTN_3_PUBLIC = {
    "flash_attn_func": "q k v | softmax_scale causal qv q_descale k_descale v_descale window_size"
    " attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
}
"""Differentiable functions of `hopper/flash_attn_interface.py`, at 01afd16."""
SOURCES = {
    "flash_attn_2": FLASH_ATTN_2,
    "flash_attn_3": Source(
        # hopper/flash_attn_interface.py at 0251105
        "flash_attn_interface",
        {
            "_flash_attn_forward": "q k v | k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new"
            " seqused_q seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos"
            " rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left"
            " window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata num_splits"
            " pack_gqa sm_margin",
            "_flash_attn_backward": "dout q k v out softmax_lse | cu_seqlens_q cu_seqlens_k sequed_q sequed_k"
            " max_seqlen_q max_seqlen_k dq dk dv softmax_scale is_causal window_size_left window_size_right"
            " softcap deterministic sm_margin",
        },
    ),
    "flash_attn_4": Source(
        # at 0251105
        "flash_attn.cute.interface",
        {
            "_flash_attn_fwd": "q k v | qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q"
            " max_seqlen_k min_seqlen_k page_table softmax_scale causal softcap window_size_left"
            " window_size_right learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap num_threads num_splits"
            " pack_gqa _arch score_mod mask_mod block_sparse_tensors return_lse out lse aux_tensors"
            " aux_scalars q_descale k_descale v_descale gather_kv_indices scheduler_metadata"
            " seqlen_k_per_split disable_scheduler_metadata",
            "_flash_attn_bwd": "q k v out dout lse | softmax_scale causal softcap window_size_left"
            " window_size_right m_block_size n_block_size num_threads pack_gqa num_stages_Q num_stages_dO"
            " SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ V_in_regs"
            " cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k deterministic dq dk dv"
            " score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors dlse"
            " learnable_sink",
        },
    ),
}


QKV = ("q", "k", "v", "out", "dout")
"""Parameters that are tensors of queries, keys and values; only a backward has the last two."""


def parameters(text):
    """Return the names of the required and of the optional parameters."""
    required, optional = text.split("|")
    return required.split(), optional.split()


def write_package(folder, source):
    """Write a package whose functions have exactly these parameters and append their names to `calls`."""
    *packages, module = source.module.split(".")
    place = folder
    for package in packages:
        place /= package
        place.mkdir()
        (place / "__init__.py").touch()
    lines = ["from tests.support.recorded_signatures import compute", "calls = []"]
    for name, text in source.functions.items():
        required, optional = parameters(text)
        signature = ", ".join([*required, *(f"{parameter}=None" for parameter in optional)])
        lines += [
            f"def {name}({signature}):",
            f"    calls.append({name!r})",
            f"    return compute({name!r}, locals())",
        ]
    (place / f"{module}.py").write_text("\n".join(lines) + "\n")


def forget_packages():
    """Remove these packages, and those that are built on them, from the imported modules."""
    roots = {"flash_attn", "flash_attn_interface", "ring_flash_attn", "ringmaster", "yunchang"}
    for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
        del sys.modules[name]


def compute(name, arguments):
    """Compute what flash-attention's function of this name computes, with the kernel `math`."""
    arguments = {key: value for key, value in arguments.items() if value is not None}
    is_causal = arguments.get("causal", False) or arguments.get("is_causal", False)
    if "varlen" in name or "cu_seqlens_q" in arguments:
        return _compute_packed(arguments, is_causal)
    call = {"causal": is_causal, "scale": arguments.get("softmax_scale", arguments["q"].shape[-1] ** -0.5)}
    q, k, v, *of_backward = (arguments[key].transpose(1, 2) for key in QKV if key in arguments)
    if not of_backward:
        out, lse = kernel_forward(KERNELS["math"], q, k, v, **call)
        return out.transpose(1, 2), lse.float(), None, None
    out, dout = of_backward
    lse = arguments["lse"] if "lse" in arguments else arguments["softmax_lse"]
    grads = kernel_backward(KERNELS["math"], dout, q, k, v, out, lse, **call)
    grads = tuple(grad.transpose(1, 2) for grad in grads)
    for key, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        if key in arguments:
            arguments[key].copy_(grad)
    return grads


def _compute_packed(arguments, is_causal):
    cu_seqlens = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    longest = [int(ends.diff().max()) for ends in cu_seqlens]  # FlashAttention-4's backward does not get it
    assert [arguments.get(f"max_seqlen_{which}") for which in "qk"] in (longest, [None, None])
    packing = Packing(*cu_seqlens, *longest, is_causal, arguments["softmax_scale"])
    q, k, v, *of_backward = (arguments[key] for key in QKV if key in arguments)
    if not of_backward:
        return *packed_forward(KERNELS["math"], q, k, v, packing), None, None
    out, dout = of_backward
    lse = arguments["lse"] if "lse" in arguments else arguments["softmax_lse"]
    into = tuple(
        arguments.get(f"d{name}", torch.empty_like(x)) for name, x in zip("qkv", (q, k, v), strict=True)
    )
    packed_backward(KERNELS["math"], into, dout, (q, k, v), out, lse, packing)
    return into
