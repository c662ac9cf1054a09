"""Write what the README shows of results/reference/cpu: `python results/reference/write_readme.py`.

That is the block of terminal output in README.md, the figure beside it, and the folder's summary.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("results/reference/cpu")
BLOCK = re.compile(r"(<!-- output[^>]*-->\n).*?(<!-- end of output -->)", re.DOTALL)
KEPT = ("summary.md", "summary.csv", "figures/throughput.png")
WIDTH = 112
LEFT_OUT = ("Differences may be chance", "report: ")
"""How the lines begin that the README leaves out: what to run next, and where the page is."""


def reported(scratch: Path) -> str:
    """What the report of the records prints; its files are below `scratch`."""
    shutil.copytree(ROOT / FOLDER, scratch / FOLDER)
    run = [sys.executable, "-m", "analysis.report", str(FOLDER)]
    places = {"cwd": scratch, "env": {"PYTHONPATH": str(ROOT)}}
    return subprocess.run(run, **places, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603


def block(printed: str) -> str:
    """The same as indented lines that fit the page."""
    kept = [line for line in printed.splitlines() if not line.startswith(LEFT_OUT)]
    lines = [part for line in kept for part in textwrap.wrap(line, WIDTH) or [""]]
    return "\n" + "".join(f"    {line}\n" for line in lines) + "\n"


def main() -> None:
    """Write README.md and the files of KEPT."""
    readme = ROOT / "README.md"
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        output = block(reported(scratch))
        readme.write_text(BLOCK.sub(lambda found: found[1] + output + found[2], readme.read_text()))
        for kept in KEPT:
            shutil.copyfile(scratch / FOLDER / kept, ROOT / FOLDER / kept)


if __name__ == "__main__":
    main()
