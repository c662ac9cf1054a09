"""Python packages (distributions) that a cell needs, and those that may change what it measures."""

from __future__ import annotations

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.common.environment import CUDA_PACKAGES, installed_version
from bench.config import Cell
from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS
from bench.training.trainer_facts import TRAINER_FACTS


def needed_packages(cell: Cell) -> dict[str, str]:
    """Return the distributions that a cell's ranks need, by the choice that needs them."""
    engine, trainer = ENGINE_FACTS.get(cell.engine.name), TRAINER_FACTS.get(cell.trainer)
    needed = {
        f"strategy={cell.strategy}": STRATEGIES[cell.strategy].package,
        f"engine={cell.engine.name}": None if engine is None else engine.package,
        f"trainer={cell.trainer}": None if trainer is None else trainer.package,
    }
    return {choice: package for choice, package in needed.items() if package is not None}


def used_packages(cell: Cell) -> frozenset[str]:
    """Return the distributions that may change what the cell's ranks measure, torch among them."""
    kernel = KERNEL_FACTS[cell.kernel].package
    return frozenset(
        [
            "torch",
            *needed_packages(cell).values(),
            *([] if kernel is None else [kernel]),
            *(["transformers"] if cell.workload.trains else []),
            *(CUDA_PACKAGES if cell.cluster.device == "cuda" else ()),
            *STRATEGIES.packages(cell.strategy),
        ]
    )


def package_refusals(cell: Cell) -> list[str]:
    """Return the reasons why the cell cannot run with the installed packages, each with a way out."""
    facts = STRATEGIES[cell.strategy]
    missing = {
        choice: package
        for choice, package in needed_packages(cell).items()
        if installed_version(package) is None
    }
    return [
        *KERNEL_FACTS[cell.kernel].package_refusals(cell),
        *(
            f"{choice} needs the package {package}; install it with: "
            + (facts.install_command if package == facts.package else f"pip install {package}")
            for choice, package in missing.items()
        ),
    ]
