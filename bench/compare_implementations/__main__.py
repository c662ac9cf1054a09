"""Every implementation side by side: `python -m bench.compare_implementations`; exits 1 where ours is slower.

The sweep `experiment=implementations` in a folder: one attention call, forward and backward, of ours and of
the packages that are installed here, in turns, in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.command import SCRIPT, tool_words
from bench.config import ExitCode
from bench.experiments.implementations_table import FILE


def main(words: Sequence[str] | None = None) -> None:
    """Run the sweep, which prints its table, and say where ours is slower."""
    parser = argparse.ArgumentParser(prog=tool_words("bench.compare_implementations"), description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help=f"a new folder, for records and {FILE}")
    arguments, asked = parser.parse_known_args(words)
    folder: Path = arguments.output
    code = _swept("-m", "experiment=implementations", f"sweep_dir={folder}", *asked)
    if code != ExitCode.OK or not (folder / FILE).exists():
        sys.exit(code)
    slower = [row for row in json.loads((folder / FILE).read_text())["rows"] if row["ours_is_slower"]]
    for row in slower:
        print(f"{row['counterpart']} is slower than {row['implementation']} at {row['seq_len']} tokens")
    sys.exit(ExitCode.FAILED if slower else ExitCode.OK)


def _swept(*words: str) -> int | str | None:
    """Run the sweep that these words ask for; its exit code."""
    import run_sweep

    sys.argv = [SCRIPT, *words]
    try:
        run_sweep.main()
    except SystemExit as ended:
        return ended.code
    return ExitCode.OK


if __name__ == "__main__":
    main()
