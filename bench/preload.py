"""What the fork server imports once, so that no rank has to. Importing runs no tensor operation."""

import gc
import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# ZeRO's first optimizer check imports Muon, and with it torch's whole compiler: seconds per rank.
import deepspeed.runtime.zero.muon.muon_optimizer
import torch.profiler
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3

import bench.worker
from bench.strategies import STRATEGIES

len(STRATEGIES)  # reads once for all ranks which packages offer strategies; imports none of them

# What imports made stays for ever: out of the collector's sight, a rank finds its tensors in milliseconds.
gc.collect()
gc.freeze()

__all__ = ["STRATEGIES", "bench", "deepspeed", "torch", "transformers"]
