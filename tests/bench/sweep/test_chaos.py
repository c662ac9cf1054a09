"""A sweep whose ranks and launcher are killed again and again ends, resumed, with one record a cell."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from bench.config import WhenTaken
from bench.node.lease import VARIABLE, lease
from bench.store import Store, read_records
from tests.command import COMMAND, NO_GPU

MARK = "ULYSSES_RING_BENCH_CHAOS"
"""In the environment of every process of a sweep, however it was started, and of its children's."""
SEED = "CHAOS_SEED"
"""Names the seed of a run that is to be made again."""
CELLS = (
    "-m", "strategy=local,ulysses,ring", "seq_len=128,256,512,8k", "seed=0,1,2,3,4", "engine=ddp",
    "cluster=cpu", "cluster.world_size=2", "cluster.memory_limit_gib=0.02", "measure.steps=1",
    "measure.warmup_steps=0", "measure.trace=false", "measure.repeats=1", "measure.reference_budget_s=0",
    "measure.budget_s=1", "sweep_dir=out", "lease=refuse",
)  # fmt: skip
COUNT = 60
LIVES = 6
"""So often the launcher is started and killed before it may end by itself."""
MORE_RECORDS = (0, 12)
"""Of a life, before the launcher is ended: by time alone, a busy machine would never come to its cells."""
THEN_S = (0.0, 4.0)
"""After the last of them, anywhere in a cell, between cells or, of a life without any, while it starts."""
LIFE_S = 300.0
KILL_EVERY_S = (3.0, 20.0)
"""Between the deaths of two ranks."""
ENDINGS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)
"""No SIGINT: what a shell starts in the background ignores it, and with it all that is started from there."""
DEAD_WITHIN_S = 20.0
LAST_ROUNDS = 3
"""Records of killed ranks are run again by a resume that nobody disturbs."""


class Sweep:
    """One sweep's folder, whose launcher is started as a person would."""

    def __init__(self, folder: Path, numbers: random.Random) -> None:
        self.folder, self.numbers = folder, numbers
        self._environment = os.environ | NO_GPU | {MARK: str(folder), VARIABLE: str(folder / "leases")}

    def start(self) -> subprocess.Popen[bytes]:
        """Before the plan is stored there is nothing to resume: the same command is typed again."""
        resume = ["resume=true"] if (self.folder / "out" / "config.yaml").exists() else []
        with (self.folder / "said").open("ab") as said:
            return subprocess.Popen(
                [*COMMAND, *CELLS, *resume], cwd=self.folder, env=self._environment, stdout=said, stderr=said
            )

    def live(self) -> None:
        """One life of the launcher, with deaths among its ranks, to its own sudden end."""
        launcher, enough = self.start(), self.lines() + self.numbers.randint(*MORE_RECORDS)
        end_s, next_s = time.monotonic() + LIFE_S, self.numbers.uniform(*KILL_EVERY_S)
        while launcher.poll() is None and self.lines() < enough and time.monotonic() < end_s:
            time.sleep(0.1)
            next_s -= 0.1
            if next_s < 0:
                self.kill_a_rank(launcher.pid)
                next_s = self.numbers.uniform(*KILL_EVERY_S)
        time.sleep(self.numbers.uniform(*THEN_S))
        how = self.numbers.choice(ENDINGS)
        if launcher.poll() is None:
            launcher.send_signal(how)
        code = launcher.wait(60)
        assert code in {0, 1, 130, -signal.SIGKILL}, (code, self.said()[-2000:])
        self.assert_nothing_left()

    def kill_a_rank(self, launcher: int) -> None:
        """One of the processes that the fork server started, if any runs."""
        ranks = [each for each in self.processes() if launcher not in {each.pid, each.ppid()}]
        if ranks:
            self.numbers.choice(sorted(ranks, key=lambda each: each.pid)).kill()

    def processes(self) -> list[psutil.Process]:
        """All that carry the mark, whoever is their parent."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != "zombie":
                    process.ppid()
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_nothing_left(self) -> None:
        """No process; then nobody holds the folder or the machine."""
        deadline_s = time.monotonic() + DEAD_WITHIN_S
        while (left := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not left
        with Store(self.folder / "out"), pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, str(self.folder / "leases"))
            with lease((), WhenTaken.REFUSE, print):
                pass

    def lines(self) -> int:
        path = self.folder / "out" / "records.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def said(self) -> str:
        return (self.folder / "said").read_text()


@pytest.fixture
def sweep(tmp_path, capsys):
    """One whose seed is printed; nothing of it outlives the test, however that ends."""
    seed = int(os.environ.get(SEED, random.SystemRandom().randrange(10**6)))
    with capsys.disabled():
        print(f"\n{SEED}={seed}", flush=True)
    sweep = Sweep(tmp_path, random.Random(seed))
    yield sweep
    for process in sweep.processes():
        process.kill()


@pytest.mark.slow  # some five minutes on two cores
@pytest.mark.ranks
def test_sixty_cells_under_kills_end_as_sixty_records(sweep, tmp_path):
    for _ in range(LIVES):
        sweep.live()
    rounds = 0
    while (code := sweep.start().wait(1200)) != 0 and rounds < LAST_ROUNDS:
        rounds += 1
    assert code == 0, sweep.said()[-3000:]
    sweep.assert_nothing_left()
    records = read_records(tmp_path / "out" / "records.jsonl")
    final = Counter((r["cell_id"], r["repeat"]) for r in records if r["status"] in {"ok", "out_of_memory"})
    assert (len(final), {*final.values()}) == (COUNT, {1})
    assert {(r["cell_id"], r["repeat"]) for r in records} == {*final}
    newest = {(r["cell_id"], r["repeat"]): r["status"] for r in records}
    assert {*newest.values()} == {"ok", "out_of_memory"}
    report = subprocess.run(
        [sys.executable, "-m", "analysis.report", str(tmp_path / "out")],
        cwd=Path(COMMAND[1]).parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "report:" in report.stdout
