"""What a record was made with: code, torch, other packages, device. Two of another origin are not mixed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
HARDWARE = PACKAGE.parent / "ulysses_ring_bench" / "conf" / "hardware"
"""Figures that predictions are computed from; all other choices of conf/ are in a cell's configuration."""
ABOVE_CELLS = frozenset(
    {
        *("accuracy", "calibrate", "compare_implementations", "experiments", "judge_packages"),
        *("observation", "overhead", "runbook", "sweep"),
    }
)
"""What no cell imports, by pyproject's layers: an edit there changes no record."""
CODE, TORCH, DEVICE = "code", "torch", "device"
NOT_KNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Departure:
    """One thing that is not the same in two origins."""

    what: str
    """CODE, TORCH, DEVICE or a package."""
    then: str
    here: str

    @property
    def words(self) -> str:
        """`other code (1a2b3c4-0f1e2d, here 5d6e7f8-9a8b7c)`."""
        return f"other {self.what} ({self.then}, here {self.here})"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a record was made with, as its environment says it; None where that does not say."""

    code: str | None
    """Commit and digest of the sources. Both count: a commit is what people compare, and only the digest
    knows of an edit that is not committed, or of an installed copy, which has no commit."""
    device: str | None
    packages: Mapping[str, str | None]

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> Origin:
        """That of a record's `environment`."""
        return cls(
            code=code_label(environment),
            device=environment.get("device_name"),
            packages=environment.get("packages") or {},
        )

    @property
    def torch(self) -> str | None:
        return self.packages.get(TORCH)

    def departures(self, here: Origin, packages: Collection[str] | None) -> list[Departure]:
        """What was not as it is `here`: code, then device, torch and these other packages.

        `packages` is None for a prediction, which is arithmetic and depends on code alone. Unknown code or
        an unknown device is not the same as any; a package that neither has is.
        """
        pairs: list[tuple[str, str | None, str | None]] = [(CODE, self.code, here.code)]
        if packages is not None:
            pairs.append((DEVICE, self.device, here.device))
        found = [
            Departure(what, then or NOT_KNOWN, now or NOT_KNOWN)
            for what, then, now in pairs
            if then is None or then != now
        ]
        names = [] if packages is None else [TORCH, *sorted({*packages} - {TORCH})]
        versions = [(name, self.packages.get(name), here.packages.get(name)) for name in names]
        return found + [
            Departure(name, then or "none", now or "none") for name, then, now in versions if then != now
        ]


def code_label(environment: Mapping[str, Any]) -> str | None:
    """`1a2b3c4-0f1e2d`: the commit and the digest of the sources, or the one of them that is known.

    Records of before there was a digest have the commit alone, and so are of other code than any later one.
    """
    commit, sources = environment.get("git_commit"), environment.get("sources")
    parts = [str(commit)[:7]] if commit else []
    return "-".join([*parts, *([str(sources)[:6]] if sources else [])]) or None


@cache
def sources_digest() -> str:
    """Twelve hex digits of every source file that a cell may run and of the figures for predictions.

    Computed once: an edit made while a sweep runs is not what its warm processes have imported. A plugin
    counts by its version, which `packages` has.
    """
    return digest_of(PACKAGE, HARDWARE)


def digest_of(package: Path, hardware: Path) -> str:
    """The same of these folders, whatever their place."""
    sources = (path.relative_to(package) for path in package.rglob("*.py"))
    told = [(str(path), package / path) for path in sources if Path(path.parts[0]).stem not in ABOVE_CELLS]
    told += [(f"hardware/{path.name}", path) for path in hardware.glob("*.yaml")]
    whole = hashlib.sha256()
    for name, path in sorted(told):
        content = path.read_bytes()
        whole.update(f"{name}\n{len(content)}\n".encode())
        whole.update(content)
    return whole.hexdigest()[:12]
