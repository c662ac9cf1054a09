"""Command `ulysses-ring-bench`, which runs a sweep as `python run_sweep.py` does, or one of TOOLS."""

from __future__ import annotations

import importlib
import sys

from ulysses_ring_bench import TREE, refuse_another_bench


def main() -> int:
    """Run the command line and return its exit code."""
    sys.path.insert(0, str(TREE))  # before other folders that contain a `bench`
    try:
        refuse_another_bench()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    from bench.common.command import TOOLS

    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word not in TOOLS:
        import run_sweep

        run_sweep.main()
        return 0
    del sys.argv[1]
    module = importlib.import_module(TOOLS[word])
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{TOOLS[word]}.__main__")
    code: int | None = module.main()
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
