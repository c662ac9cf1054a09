"""Which statements of `bench` run on a GPU alone, and which of them no test on the fake CUDA executes.

    python -m tests.cuda_lines

runs the tests on the fake CUDA and on a fake NVML, lists the rest by name, and exits with 1 where there are
more than MAX_LEFT.

Derived from the sources: branches whose condition holds on CUDA or NCCL alone, what a table has under the key
"cuda", functions and classes with CUDA, NCCL, NVML, NVTX or GPU in their names, modules so named, kernels
that have no CPU among their devices, and modules that only such modules import. Module level code runs on
import.
"""

import ast
import os
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.environment import REPOSITORY

MAX_LEFT = 5
TESTS = (
    "tests/test_fake_cuda.py", "tests/bench/test_nvml.py", "tests/bench/passes/test_telemetry.py",
    "tests/bench/request/test_bad_values.py::test_the_visible_gpus_are_those_that_cuda_would_show",
)  # fmt: skip
FOLDER = "CUDA_LINES"
"""The variable that names where ranks write what they executed."""
ON_GPU, ELSEWHERE = {"cuda", "nccl"}, {"cpu", "gloo"}
IN_NAMES = ("cuda", "nccl", "nvml", "nvtx", "gpu")
ASKS_CUDA = {"is_initialized", "is_available"}
NO_RANK = {"request", "sweep", "cost", "calibrate", "nodes", "experiments", "accuracy", "overhead"}
"""Rooms that plan: they read the device of a cell and run on any machine."""
NO_STATEMENT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global)


def holds_on_gpu(test):
    """True of a condition that holds on a GPU alone, False of one that holds elsewhere alone, else None."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            found = holds_on_gpu(operand)
            answer = None if found is None else not found
        case ast.BoolOp(op=ast.And(), values=values):
            answer = True if any(map(holds_on_gpu, values)) else None
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            answer = compared(isinstance(op, ast.Eq | ast.In), left, right)
        case ast.Call(func=ast.Name(id="any" | "all"), args=[ast.GeneratorExp(elt=each)]):
            answer = holds_on_gpu(each)
        case ast.Call():
            answer = asks_cuda(test) or None
        case _:
            answer = None
    return answer


def compared(is_equal, *sides):
    """Whether two sides of which one is a kind of device or process group are equal on a GPU alone."""
    words = {each.value for each in sides if isinstance(each, ast.Constant)}
    if words & ON_GPU:
        return is_equal
    return not is_equal if words & ELSEWHERE else None


def asks_cuda(call):
    """`torch.cuda.is_initialized()`, or `isinstance` of a class for CUDA."""
    match call.func:
        case ast.Attribute(value=ast.Attribute(attr="cuda"), attr=name):
            return name in ASKS_CUDA
        case ast.Name(id="isinstance"):
            return is_named_so(ast.unparse(call.args[1]))
    return False


def is_named_so(name):
    return any(word in name.lower() for word in IN_NAMES)


def statements(nodes):
    """The first lines of all statements in these, docstrings and definitions left out."""
    for node in nodes:
        for each in ast.walk(node):
            is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            if isinstance(each, ast.stmt) and not isinstance(each, NO_STATEMENT) and not is_text:
                yield each.lineno


def tabled(tree):
    """Names that a table has under the key "cuda"."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Dict):
            for key, value in zip(each.keys, each.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "cuda" and isinstance(value, ast.Name):
                    yield value.id


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


def lines_of(tree, names, *, whole):
    """The lines of one module; `whole` is a module that only a GPU uses."""
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    if whole:
        inside = {line for each in functions for line in statements(each.body)}
        return inside - {*branches(tree, on_gpu=False)}
    named = (
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef | ast.ClassDef) and (is_named_so(each.name) or each.name in names)
    )
    inside = {line for each in functions for line in statements(each.body)}
    found = {line for each in named for line in statements(each.body)}
    return (found | {*branches(tree, on_gpu=True)}) & inside - {*branches(tree, on_gpu=False)}


def imported(tree):
    """The modules of `bench` that a module imports, as paths below the repository."""
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("bench"):
            yield f"{each.module.replace('.', '/')}.py"
            yield from (f"{each.module.replace('.', '/')}/{alias.name}.py" for alias in each.names)


def cuda_only():
    """By file, below the repository, the lines of statements that run on a GPU alone."""
    trees = {
        str(path.relative_to(REPOSITORY)): ast.parse(path.read_text())
        for path in sorted((REPOSITORY / "bench").rglob("*.py"))
        if path.relative_to(REPOSITORY).parts[1] not in NO_RANK
    }
    importers = defaultdict(set)
    for name, tree in trees.items():
        for other in imported(tree):
            importers[other].add(name)
    whole = {name for name in trees if is_named_so(Path(name).stem)}
    whole |= {
        f"bench/attention/kernels/{name}.py"
        for name, facts in KERNEL_FACTS.items()
        if "cpu" not in facts.dtypes
    }
    while more := {name for name in trees if importers[name] and importers[name] <= whole} - whole:
        whole |= more
    names = {name for tree in trees.values() for name in tabled(tree)}
    found = {name: lines_of(tree, names, whole=name in whole) for name, tree in trees.items()}
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
    left = [
        f"{name}:{line}"
        for name, lines in wanted.items()
        for line in sorted(lines)
        if f"{name}:{line}" not in seen
    ]
    total = sum(map(len, wanted.values()))
    for place in left:
        name, line = place.split(":")
        print(f"  {place}: {(REPOSITORY / name).read_text().splitlines()[int(line) - 1].strip()}")
    print(f"not executed: {len(left)} of {total} statements that run on a GPU alone, in {len(wanted)} files")
    return code or len(left) > MAX_LEFT


if __name__ == "__main__":
    sys.exit(main())
