"""Cells of the training stacks, ringmaster and yunchang, all of which must be `ok`.

    python -m tests.all_extras

Types one command for the strategies of each engine, and exits 1 unless every cell is ok. It needs
`pip install -e '.[all]'` and nothing of `.[test]`, which has the packages of the extras `data` and `quality`
and tests them. The extra `gpu` needs a GPU.
"""

import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.common.environment import REPOSITORY
from bench.record.store import read_records
from bench.strategies import STRATEGIES
from bench.training.trainer_facts import TRAINER_FACTS

STACKS = ",".join(trainer for trainer, facts in TRAINER_FACTS.items() if facts.is_stack)
PACKAGES = ",".join(name for name, facts in STRATEGIES.items() if facts.tested_version)
SWEEPS = (
    f"trainer={STACKS} strategy=local,deepspeed_ulysses engine=zero3",
    f"trainer={STACKS} strategy=torch_cp engine=fsdp2",
    f"strategy={PACKAGES}",
)


def run_sweep(words, folder):
    """Run a sweep of cells of 1,024 tokens and return its records."""
    size = ("seq_len=1k", "model=qwen3_nano", "cluster=cpu", "cluster.world_size=2", "measure.budget_s=2")
    command = [sys.executable, "run_sweep.py", "-m", *size, *words.split(), f"sweep_dir={folder}"]
    subprocess.run(command, cwd=REPOSITORY, check=False)  # the records say what failed
    return [record for record in read_records(folder / "records.jsonl") if record.role == "cell"]


def main():
    started_s, passed, failed = time.monotonic(), 0, 0
    for words in SWEEPS:
        with tempfile.TemporaryDirectory() as folder:
            records = run_sweep(words, Path(folder))
        ok = sum(record.status == "ok" for record in records)
        passed += ok
        failed += math.prod(len(word.split(",")) for word in words.split()) - ok
    print(f"{passed} cells of all extras are ok, {failed} are not, in {time.monotonic() - started_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
