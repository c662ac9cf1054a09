"""Our modules, also where `bench`, `analysis` or `run_sweep` is somebody else's.

Such a name then stands below ours: `ulysses_ring_bench.bench.config`. It is the same file, and where it
imports or names a module of ours, it means that below ours too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

FACE = __name__.partition(".")[0]
HOME = Path(__file__).resolve().parent.parent
"""The folder that holds our packages: a checkout, or site-packages."""
TOPS = ("bench", "analysis", "run_sweep")
"""Names of ours that may be somebody else's too; each imports those before it."""


def own_module(name: str) -> ModuleType:
    """One of our modules, by the name that it has in a checkout, such as `bench.config`."""
    return importlib.import_module(FINDER.own_name(name))


class OwnFinder(MetaPathFinder):
    """Finds our modules below FACE. Those it has found there once are meant there by all of ours."""

    def __init__(self) -> None:
        self._below: set[str] = set()

    def own_name(self, name: str) -> str:
        """What one of our modules is called in this process."""
        top = name.partition(".")[0]
        needed = TOPS[: TOPS.index(top) + 1]
        is_plain = self._below.isdisjoint(needed) and all(map(_is_ours, needed))
        return name if is_plain else f"{FACE}.{name}"

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002  the protocol's signature
    ) -> ModuleSpec | None:
        face, _, name = fullname.partition(".")
        top = name.partition(".")[0]
        if face != FACE or top not in TOPS:
            return None
        self._below.add(top)
        spec = PathFinder.find_spec(fullname, [str(HOME)] if name == top else path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = OwnLoader(fullname, spec.loader.path)
        return spec


class OwnLoader(SourceFileLoader):
    """Reads a module of ours as one below FACE. Its bytecode is not kept: the file's own is another."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = OwnNames().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class OwnNames(ast.NodeTransformer):
    """Names our modules as `OwnFinder` does: in imports, and in texts that are such a name.

    A text is one where it is the name of a file or folder of ours, as `"bench.passes."` of an f-string is; a
    text for people has blanks.
    """

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.level == 0 and node.module is not None:
            node.module = _own(node.module)
        return node

    def visit_Import(self, node: ast.Import) -> Any:
        return [each for alias in node.names for each in _own_import(alias, node)]

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and _is_module(node.value):
            return ast.copy_location(ast.Constant(_own(node.value)), node)
        return node


def _own_import(alias: ast.alias, node: ast.Import) -> list[ast.stmt]:
    own, top = _own(alias.name), alias.name.partition(".")[0]
    if own == alias.name:
        return [ast.copy_location(ast.Import([alias]), node)]
    imported = ast.copy_location(ast.Import([ast.alias(own, alias.asname)]), node)
    if alias.asname is not None:
        return [imported]
    # `import bench.cell` binds `bench`, and not what stands first in the longer name.
    return [imported, ast.copy_location(ast.ImportFrom(FACE, [ast.alias(top)], 0), node)]


def _own(name: str) -> str:
    return FINDER.own_name(name) if name.partition(".")[0] in TOPS else name


def _is_module(text: str) -> bool:
    top, *rest = text.rstrip(".").split(".")
    if top not in TOPS or not rest or not all(part.isidentifier() for part in rest):
        return False
    path = HOME.joinpath(top, *rest)
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def _is_ours(top: str) -> bool:
    """Whether a plain import of this name gives ours, now and for the rest of the process."""
    imported = sys.modules.get(top)
    if imported is not None:
        place = getattr(imported, "__file__", None)
    else:
        spec = importlib.util.find_spec(top)
        place = None if spec is None else spec.origin
    own = HOME / f"{top}.py", HOME / top / "__init__.py"
    return place is not None and Path(place).resolve() in own


FINDER = OwnFinder()
sys.meta_path.insert(0, FINDER)  # before the one that would read packages' files as they are
