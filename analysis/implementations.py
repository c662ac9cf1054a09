"""The figures of `python -m bench.compare_implementations --output FOLDER`: which implementation?

`python -m analysis.implementations FOLDER` draws them into that folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.command import tool_words
from bench.config import ExitCode

FILE = "implementations.json"


def main(words: Sequence[str] | None = None) -> None:
    """Draw a figure for each number of ranks and of heads, and say where they are."""
    parser = argparse.ArgumentParser(prog=tool_words("analysis.implementations"), description=__doc__)
    parser.add_argument("folder", type=Path, help=f"one that holds {FILE}")
    folder = parser.parse_args(words).folder
    try:
        kept = json.loads((folder / FILE).read_text())
        rows, on_cpu = kept["rows"], not kept["environment"].get("gpus")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(
            f"{folder / FILE}: not a comparison that bench.compare_implementations wrote"
            f" ({type(error).__name__}: {error}); name the folder given to its --output",
            file=sys.stderr,
        )
        sys.exit(ExitCode.REQUEST_WRONG)
    from analysis.figures.implementations import write_implementations

    for place in write_implementations(rows, on_cpu, folder):
        print(f"figure: {place}.png")


if __name__ == "__main__":
    main()
