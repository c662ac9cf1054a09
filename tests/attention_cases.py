"""The parity pass on many cells in one set of ranks, without training any of them."""

import json

from bench.config import RunConfig
from bench.measure.parity import check_parity
from bench.process_groups import make_groups
from bench.rank_device import finish_together
from bench.strategies import STRATEGIES, runnable


def check_attention(job, log):
    """A rank's whole life: every case of the folder's `cases.json`, to `errors.json` and `limits.json`."""
    from bench.worker import join

    device = join(job)
    outcomes = []
    for fields, causal in json.loads((job.folder / "cases.json").read_text()):
        cell = RunConfig.from_json(fields)
        with log.during(f"{cell.strategy} {cell.layout} {cell.dtype}"):
            strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            outcomes.append(check_parity(strategy, device, causal=causal))
    if job.rank == 0:
        (job.folder / "errors.json").write_text(json.dumps([outcome.errors for outcome in outcomes]))
        (job.folder / "limits.json").write_text(json.dumps([outcome.limits for outcome in outcomes]))
    finish_together(device)
    return {}
