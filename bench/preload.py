"""What the fork server imports once, so that no rank has to. Importing runs no tensor operation."""

import os

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.profiler
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3

import bench.worker

__all__ = ["bench", "deepspeed", "torch", "transformers"]
