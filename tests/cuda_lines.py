"""Which statements of `bench` run on a GPU alone, and which of them no test on the fake CUDA executes.

    python -m tests.cuda_lines

runs the tests on stand-ins for CUDA, NVML and packages, lists the rest by name, and exits with 1 where there
are more than MAX_LEFT.

Derived from the sources: branches whose condition holds on CUDA or NCCL alone, functions and classes with
CUDA, NCCL, NVML, NVTX or GPU in their names, modules so named, and kernels that have no CPU among their
devices. Module level code runs on import.
"""

import ast
import os
import re
import sys
import tempfile
import threading
from pathlib import Path

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.environment import REPOSITORY

MAX_LEFT = 5
TESTS = (
    "tests/test_fake_cuda.py", "tests/bench/test_nvml.py", "tests/bench/passes/test_telemetry.py",
    "tests/bench/passes/test_cuda_timeline.py", "tests/bench/attention/test_flash_attn_signatures.py",
    "tests/bench/request/test_bad_values.py::test_the_visible_gpus_are_those_that_cuda_would_show",
)  # fmt: skip
FOLDER = "CUDA_LINES"
"""The variable that names where ranks write what they executed."""
ON_GPU = re.compile(
    r"== '(cuda|nccl)'|!= '(cpu|gloo)'|'nccl' in |cuda\.is_|isinstance\(.*cuda", re.IGNORECASE
)
ELSEWHERE = re.compile(r"== '(cpu|gloo)'|!= '(cuda|nccl)'")
"""Conditions that hold on a GPU alone, and elsewhere alone."""
NAMED_SO = re.compile("cuda|nccl|nvml|nvtx|gpu", re.IGNORECASE)
WHOLE = {"bench/passes/trace/cuda_timeline.py", *(
    f"bench/attention/kernels/{name}.py" for name, facts in KERNEL_FACTS.items() if "cpu" not in facts.dtypes
)}  # fmt: skip
"""Files that only a GPU uses, beside those that are named so."""
NO_RANK = {"request", "sweep", "cost", "predict", "nodes", "experiments"}
"""Rooms that plan: they read the device of a cell and run on any machine."""
NO_STATEMENT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global)


def holds_on_gpu(test):
    """True of a condition that holds on a GPU alone, False of one that holds elsewhere alone, else None."""
    text = ast.unparse(test)
    if ON_GPU.search(text) and " or " not in text:
        return True
    return False if ELSEWHERE.search(text) and not re.search(" and | or ", text) else None


def statements(nodes):
    """The first lines of all statements in these, docstrings and definitions left out."""
    for node in nodes:
        for each in ast.walk(node):
            is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            if isinstance(each, ast.stmt) and not isinstance(each, NO_STATEMENT) and not is_text:
                yield each.lineno


def branches(tree, *, on_gpu):
    """Statements that run on a GPU alone, or elsewhere alone, by the conditions around and before them."""
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for number, each in enumerate(block if isinstance(block, list) else ()):
                if isinstance(each, ast.If) and (found := holds_on_gpu(each.test)) is not None:
                    yield from statements(each.body if found is on_gpu else each.orelse)
                    leaves = isinstance(each.body[-1], ast.Return | ast.Raise | ast.Continue)
                    if found is not on_gpu and leaves and not each.orelse:
                        yield from statements(block[number + 1 :])


def lines_of(tree, *, whole):
    """The lines of one module; `whole` is a module that only a GPU uses."""
    definitions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    functions = [each for each in definitions if isinstance(each, ast.FunctionDef)]
    inside = {line for each in functions for line in statements(each.body)}
    named = {line for each in definitions if NAMED_SO.search(each.name) for line in statements(each.body)}
    found = inside if whole else inside & (named | {*branches(tree, on_gpu=True)})
    return found - {*branches(tree, on_gpu=False)}


def cuda_only():
    """By file, below the repository, the lines of statements that run on a GPU alone."""
    found = {}
    for path in sorted((REPOSITORY / "bench").rglob("*.py")):
        name = path.relative_to(REPOSITORY)
        if name.parts[1] not in NO_RANK:
            whole = str(name) in WHOLE or NAMED_SO.search(name.stem) is not None
            found[str(name)] = lines_of(ast.parse(path.read_text()), whole=whole)
    return {name: lines for name, lines in found.items() if lines}


class Executed:
    """The lines of some files that this process executes."""

    def __init__(self, files):
        self._files = {str(REPOSITORY / name): name for name in files}
        self.lines = set()

    def start(self):
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self, folder):
        sys.settrace(None)
        threading.settrace(None)
        text = "".join(f"{name}:{line}\n" for name, line in sorted(self.lines))
        (Path(folder) / f"{os.getpid()}.lines").write_text(text)

    def _call(self, frame, event, arg):
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.lines.add((self._files[frame.f_code.co_filename], frame.f_lineno))
        return self._line


def main():
    """Run the tests, and tell what they leave."""
    import pytest

    wanted = cuda_only()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        executed = Executed(wanted)
        executed.start()
        code = pytest.main(["-q", "-n0", *TESTS, *sys.argv[1:]])
        executed.stop(folder)
        seen = {line for path in Path(folder).glob("*.lines") for line in path.read_text().split()}
    places = [(name, line) for name, lines in wanted.items() for line in sorted(lines)]
    left = [(name, line) for name, line in places if f"{name}:{line}" not in seen]
    for name, line in left:
        print(f"  {name}:{line}: {(REPOSITORY / name).read_text().splitlines()[line - 1].strip()}")
    print(f"not executed: {len(left)} of {len(places)} statements that run on a GPU alone")
    return code or len(left) > MAX_LEFT


if __name__ == "__main__":
    sys.exit(main())
