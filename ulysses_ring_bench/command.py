"""The command `ulysses-ring-bench`: a sweep, as `python run_sweep.py` runs one, or one of TOOLS."""

from __future__ import annotations

import sys

from ulysses_ring_bench.own_modules import own_module


def main() -> int:
    """Run what was typed; the exit code."""
    tools: dict[str, str] = own_module("bench.command").TOOLS
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word not in tools:
        own_module("run_sweep").main()
        return 0
    del sys.argv[1]
    module = own_module(tools[word])
    if hasattr(module, "__path__"):
        module = own_module(f"{tools[word]}.__main__")
    code: int | None = module.main()
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
