"""All that ranks import.

Importing runs no tensor operation, or the ranks would hang in OpenMP. Nor does it touch CUDA, even through
NVML: a driver does not survive a fork.
"""

import numpy.ma  # with numpy's first `unique`
import torch.profiler
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3

import bench.node.worker
from bench.passes import PASSES, rank_code
from bench.strategies import STRATEGIES

for _name in PASSES:
    rank_code(_name)
len(STRATEGIES)  # reads once for all ranks which packages have strategies; imports none of them

__all__ = ["STRATEGIES", "bench", "numpy", "torch", "transformers"]
