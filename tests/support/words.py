"""Rules for names and prose of the product, and the places that break them.

`python -m tests.support.words [PATH ...]` prints these places, one a line.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("bench", "analysis", "hydra_plugins", "ulysses_ring_bench", "run_sweep.py")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "conf")

FIRST_WORDS = re.compile(
    r"(What|Of|By|Why|Where|As|So|In|To|Its|Their|Which|That|Those|Around|How|When|The same|Whether it)\b"
)
"""Docstrings that begin with these need the line above, or an unspoken question, to mean anything."""
PARTICIPLE = re.compile(r"[a-z]+ed$")
NOT_PARTICIPLES = {"embed", "exceed", "need", "seed", "speed", "striped"}
IDENTIFIERS = frozenset({
    "all", "apart", "around", "at", "behind", "beside", "between", "both", "carrying", "dealt", "doing",
    "done", "during", "each", "enough", "found", "given", "held", "instead", "kept", "known", "left",
    "lent", "lost", "made", "news", "noted", "nothing", "noting", "of", "on", "once", "one", "other",
    "others", "over", "own", "said", "say", "seen", "telling", "tell", "to", "together", "told",
    "turns", "way", "what", "where", "whereabouts", "whose", "why", "with", "within", "without",
})  # fmt: skip
"""Function names that say neither what is done nor what is returned."""
PHRASES = (
    "told", "said", "beside", "whereabouts", "whoever", "nobody", "somebody", "held against", "held to",
    "takes turns", "take turns", "taken turns", "took turns", "in turns", "as many as", "so many", "what one",
    "one's own", "came to", "come to", "comes to", "is gone", "are gone", "to blame",
    "let go of", "lets go of",
)  # fmt: skip
"""Words for which the field has another, or that make a sentence hard to follow."""
PROSE = re.compile(rf"\b({'|'.join(PHRASES)})\b".replace(" ", r"\s+"), re.IGNORECASE)
FOLDERS_OF_ONE_KIND = {"__init__", "attention", "engine", "facts", "rank", "section"}
"""Module names that a registry gives to one file in each of its folders."""
LONGEST_TEST_NAME = 60
TEXTS = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def listed(*paths: str) -> list[Path]:
    """Return the files under `paths` that git tracks or would track."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths)
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in found.splitlines() if (ROOT / line).is_file()]


def python_files(*paths: str) -> list[Path]:
    return [path for path in listed(*paths) if path.suffix == ".py"]


def doubled_classes() -> dict[str, list[str]]:
    """Return the places of each class name that the product defines more than once."""
    places = defaultdict(list)
    for path in python_files(*PRODUCT):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def doubled_modules() -> dict[str, list[str]]:
    """Return the paths of each module name that `bench` or `analysis` has more than once."""
    paths = defaultdict(list)
    for path in python_files("bench", "analysis"):
        relative = path.relative_to(ROOT)
        paths[f"{relative.parts[0]}: {path.stem}"].append(str(relative))
    return {
        name: found
        for name, found in paths.items()
        if len(found) > 1 and name.split(": ")[1] not in FOLDERS_OF_ONE_KIND
    }


def odd_docstrings(path: Path) -> Iterator[str]:
    """Yield "line: problem" for each docstring that begins with a word of `FIRST_WORDS`."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and (begins := FIRST_WORDS.match(str(node.value.value).strip())):
            yield f"{node.lineno}: a docstring begins with {begins[0]!r}"


def broken_rules(path: Path) -> Iterator[str]:
    """Yield "line: problem" for each docstring, function name, comment and string that breaks a rule."""
    yield from odd_docstrings(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name.strip("_")
            if name in IDENTIFIERS or (PARTICIPLE.match(name) and name not in NOT_PARTICIPLES):
                yield f"{node.lineno}: a function is called {node.name!r}"
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in TEXTS:
                yield from (f"{token.start[0] + line}: {word!r}" for line, word in odd_words(token.string))


def odd_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the words of `PROSE` in a text, each with the number of lines before it."""
    for match in PROSE.finditer(text):
        yield text[: match.start()].count("\n"), match[0]


def long_test_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.FunctionDef)
            and node.name.startswith("test_")
            and len(node.name) > LONGEST_TEST_NAME
        ):
            yield f"{node.lineno}: {node.name} has {len(node.name)} characters"


def rows(*paths: str) -> Iterator[str]:
    """Yield "path:line: problem" for the files under `paths`, by default all."""
    for path in listed(*(paths or (*PRODUCT, *PAGES, "tests"))):
        relative = path.relative_to(ROOT)
        if relative.parts[0] == "tests":
            problems = chain(long_test_names(path), odd_docstrings(path)) if path.suffix == ".py" else ()
        elif path.suffix == ".py":
            problems = broken_rules(path)
        elif path.suffix in (".md", ".yaml", ".jinja"):
            problems = (f"{line + 1}: {word!r}" for line, word in odd_words(path.read_text()))
        else:
            problems = ()
        yield from (f"{relative}:{problem}" for problem in problems)


if __name__ == "__main__":
    print(*rows(*sys.argv[1:]), sep="\n")
    for name, places in {**doubled_classes(), **doubled_modules()}.items():
        print(f"{name} stands more than once: {', '.join(places)}")
