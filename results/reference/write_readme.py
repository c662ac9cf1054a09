"""Make what is shown of the shipped records again: `python results/reference/write_readme.py`.

That is the block of terminal output in README.md, and most summaries and figures of the folders here
(REPORTS). Records stay as they are.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Path("results/reference")
README_SWEEP = "cpu"
BLOCK = re.compile(r"(<!-- output[^>]*-->\n).*?(<!-- end of output -->)", re.DOTALL)
OF_A_SWEEP = ("throughput", "peak_memory", "attention_communication", "step_parts")
LOSSES = "figures/loss_equivalence_1k_qwen3_nano_bf16_zero3_adamw"
REPORTS = (
    (("cpu",), "cpu", ("summary.md", "summary.csv", *(f"figures/{name}.png" for name in OF_A_SWEEP))),
    (("loss_equivalence",), "loss_equivalence", ("summary.md", "summary.csv", f"{LOSSES}.png")),
    (("loss_equivalence_whole",), "loss_equivalence_whole", ("summary.md", f"{LOSSES}_3_seeds.png")),
)
"""Folders (and options) of a report, the folder here that keeps files of it, and which."""
WIDTH = 112
LEFT_OUT = ("Differences may be chance", "report: ")
"""How the lines begin that the README leaves out: what to run next, and where the page is."""


def run(module: str, *words: str, scratch: Path) -> str:
    """What one of our commands prints in a copy of the repository's results."""
    places = {"cwd": scratch, "env": {"PYTHONPATH": str(ROOT)}}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, **places, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603


def report(words: tuple[str, ...], kept_in: str, kept: tuple[str, ...], scratch: Path) -> str:
    """Keep files of the report of some folders; what it printed."""
    folders = [str(REFERENCE / word) if (ROOT / REFERENCE / word).is_dir() else word for word in words]
    output = REFERENCE / kept_in if words == (kept_in,) else Path("joint")
    printed = run("analysis.report", *folders, "--output", str(output), scratch=scratch)
    for name in kept:
        target = ROOT / REFERENCE / kept_in / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(scratch / output / name, target)
    return printed


def block(printed: str) -> str:
    """The same as indented lines that fit the page."""
    kept = [line for line in printed.splitlines() if not line.startswith(LEFT_OUT)]
    lines = [part for line in kept for part in textwrap.wrap(line, WIDTH) or [""]]
    return "\n" + "".join(f"    {line}\n" for line in lines) + "\n"


def write_block(output: str) -> None:
    """Put the terminal output of the README's sweep into README.md."""
    readme = ROOT / "README.md"
    readme.write_text(BLOCK.sub(lambda found: found[1] + output + found[2], readme.read_text()))


def main() -> None:
    """Write README.md, the files of REPORTS and the figures of the other folders."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        shutil.copytree(ROOT / REFERENCE, scratch / REFERENCE)
        for words, kept_in, kept in REPORTS:
            printed = report(words, kept_in, kept, scratch)
            if kept_in == README_SWEEP:
                write_block(block(printed))


if __name__ == "__main__":
    main()
