"""The one table of trainers: whose training loop runs."""

from __future__ import annotations

from collections.abc import Mapping

from bench.training.trainers.native import NativeTrainer

TRAINERS: Mapping[str, type[NativeTrainer]] = {"native": NativeTrainer}
