#!/usr/bin/env bash
# What to run first on a machine with GPUs. Read the steps, then start at any of them; Ctrl-C stops.
#     bash results/reference/first_hour.sh      all steps
#     bash results/reference/first_hour.sh 3    from step 3 on
# It ends at the first command that fails. It gives no verdict: read what the tests and the reports say.
set -eu
cd "$(dirname "$0")/../.."
first=${1:-1}

step() {
    [ "$1" -ge "$first" ] && printf '\n=== step %s: %s\n' "$1" "$2"
}

if step 1 "the driver and torch see the GPUs"; then
    nvidia-smi -L
    python -c "import torch; print(torch.__version__, torch.cuda.get_device_name(0), torch.cuda.device_count())"
fi

if step 2 "tests on one GPU: every kernel against float64, each engine, running out of memory"; then
    pytest -m gpu tests/bench/attention/test_kernels.py tests/gpu/test_one_gpu.py tests/gpu/test_out_of_device_memory.py
fi

if step 3 "one small cell"; then
    python run_sweep.py strategy=local model=qwen3_nano engine=ddp seq_len=1k measure.repeats=1
fi

if step 4 "several ranks on one GPU: correctness only, their times say nothing"; then
    pytest -m gpu tests/gpu/test_shared_gpu.py
    python run_sweep.py -m cluster=gpu cluster.world_size=2 cluster.ranks_per_gpu=2 model=qwen3_nano seq_len=4k
fi

if step 5 "the default sweep on all GPUs"; then
    python run_sweep.py -m seq_len=8k,64k,96k
fi

if step 6 "the published experiments: measured on four GPUs, replayed on fewer"; then
    python run_sweep.py experiment=published_throughput
    python run_sweep.py experiment=published_memory
fi
