"""The parity pass on many cells in one set of ranks, without training any of them."""

import json

import torch

from bench.config import RunConfig
from bench.measure.parity import check_parity
from bench.process_groups import make_groups
from bench.strategies import STRATEGIES, runnable


def check_attention(job, log):
    """A rank's whole life: every case of the folder's `cases.json`, errors to `errors.json`."""
    from bench.worker import join

    join(job)
    errors = []
    for fields, causal in json.loads((job.folder / "cases.json").read_text()):
        cell = RunConfig.from_json(fields)
        with log.during(f"{cell.strategy} {cell.layout} {cell.dtype}"):
            strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            errors.append(check_parity(strategy, torch.device("cpu"), causal=causal).errors)
    if job.rank == 0:
        (job.folder / "errors.json").write_text(json.dumps(errors))
    return {}
