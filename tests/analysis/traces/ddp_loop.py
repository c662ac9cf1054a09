"""Make the traces of this folder: `torchrun --nproc-per-node=2 ddp_loop.py FOLDER`, on CPU with torch 2.13.

`traceName` and `host_name`, which name the machine, were removed from the files afterwards.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = schedule(wait=1, warmup=1, active=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=steps) as profiler:
        for _ in range(4):
            model(torch.randn(512, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(Path(sys.argv[1]) / f"ddp_rank_{dist.get_rank()}.json.gz"))
    dist.destroy_process_group()
