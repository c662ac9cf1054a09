"""What the fork server imports once, so that no rank has to. Importing runs no tensor operation.

Nor does it touch CUDA, even through NVML: what a driver was told before a fork is no good after it. Left to
itself DeepSpeed starts CUDA when it is imported, to see whether there is any, so it is told; a rank on a GPU
tells it otherwise. A package that is not installed is not imported: the cells that need it are unsupported.
"""

import gc
import os
from contextlib import suppress

import torch.profiler
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with suppress(ImportError):
    # ZeRO's first optimizer check imports Muon, and with it torch's whole compiler: seconds per rank.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

import bench.cell.worker
from bench.strategies import STRATEGIES

len(STRATEGIES)  # reads once for all ranks which packages offer strategies; imports none of them

# What imports made stays for ever: out of the collector's sight, a rank finds its tensors in milliseconds.
gc.collect()
gc.freeze()

__all__ = ["STRATEGIES", "bench", "torch", "transformers"]
