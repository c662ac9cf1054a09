"""What a sweep says while it runs is what happened, letter by letter."""

import io
from dataclasses import replace

from rich.console import Console

from bench.cell import PlannedCell, run
from bench.progress import Progress
from tests.cells import tiny_cell


def test_brackets_in_a_reason_are_text_and_no_markup(launcher, tmp_path):
    planned = PlannedCell(tiny_cell("strategy=ulysses", "cluster.world_size=3"), repeat=0, order=0)
    record = replace(run(planned, launcher, tmp_path), reason="[enforce fail at alloc_cpu.cpp:127] no room")
    said = io.StringIO()
    progress = Progress(Console(file=said, width=200))
    progress.start([planned], tmp_path)
    progress.begin(planned)
    progress.end(planned, record)
    progress.stop()
    assert "[enforce fail at alloc_cpu.cpp:127] no room" in said.getvalue()
