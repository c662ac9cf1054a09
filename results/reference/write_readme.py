"""Rebuild the published output of the shipped records: `python results/reference/write_readme.py`.

The script writes the block of terminal output in README.md and the summaries and figures in REPORTS. It does
not change records.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Path("results/reference")
README_SWEEP = "cpu"
BLOCK = re.compile(r"(<!-- output[^>]*-->\n).*?(<!-- end of output -->)", re.DOTALL)
SWEEP_FIGURES = ("throughput", "peak_memory", "attention_communication", "step_parts")
LOSSES = "figures/loss_equivalence_1k_qwen3_nano_bf16_zero3_adamw"
QUALITY_FIGURES = (
    "quality",
    "quality_by_depth_local_trained_local",
    "quality_by_depth_local_trained_local_yarn",
)
WIDTH = 112
OMITTED_LINES = ("Differences may be chance", "report: ")
"""Beginnings of the lines that README.md omits: the next command to run and the path of the page."""


@dataclass(frozen=True)
class Report:
    """A report of one folder of records, and the files of it that the repository keeps."""

    folder: str
    files: tuple[str, ...]


REPORTS = (
    Report("cpu", ("summary.md", "summary.csv", *(f"figures/{name}.png" for name in SWEEP_FIGURES))),
    Report("loss_equivalence", ("summary.md", "summary.csv", f"{LOSSES}.png")),
    Report("quality", ("summary.md", "summary.csv", *(f"figures/{name}.png" for name in QUALITY_FIGURES))),
    Report("loss_equivalence_whole", ("summary.md", f"{LOSSES}_3_seeds.png")),
)


def write_report(report: Report, scratch: Path) -> str:
    """Rebuild a report in a copy of the records, copy its files to the repository and return its output."""
    folder = REFERENCE / report.folder
    command = [sys.executable, "-m", "analysis.report", str(folder)]
    environment = {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(  # noqa: S603  the command is ours
        command, cwd=scratch, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    for name in report.files:
        target = ROOT / folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(scratch / folder / name, target)
    return process.stdout


def indented_block(output: str) -> str:
    """Return the output as indented lines of at most WIDTH characters, without OMITTED_LINES."""
    shown = [line for line in output.splitlines() if not line.startswith(OMITTED_LINES)]
    lines = [part for line in shown for part in textwrap.wrap(line, WIDTH) or [""]]
    return "\n" + "".join(f"    {line}\n" for line in lines) + "\n"


def write_block(block: str) -> None:
    """Replace the block of terminal output in README.md."""
    readme = ROOT / "README.md"
    readme.write_text(BLOCK.sub(lambda match: match[1] + block + match[2], readme.read_text()))


def main() -> None:
    """Rebuild README.md and the files of REPORTS."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        shutil.copytree(ROOT / REFERENCE, scratch / REFERENCE)
        for report in REPORTS:
            output = write_report(report, scratch)
            if report.folder == README_SWEEP:
                write_block(indented_block(output))


if __name__ == "__main__":
    main()
