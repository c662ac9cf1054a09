"""The code on docs/results.md works on the shipped records."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ten_lines_of_the_results_page_draw_a_figure(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "results.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    (tmp_path / "results").symlink_to(ROOT / "results")
    places = {"cwd": tmp_path, "env": os.environ | {"MPLBACKEND": "Agg"}}
    subprocess.run([sys.executable, "-c", f"{code}\nassert len(steps_ms) == 9"], **places, check=True)
    assert (tmp_path / "own.png").stat().st_size > 10_000
