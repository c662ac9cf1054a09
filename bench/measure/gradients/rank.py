"""The gradients pass on a rank: it writes all gradients of the first step to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from bench.measure.rank_pass import RankPass
from bench.training.trainers.trainer import Trainer

FILE_NAME = "gradients.npz"


class GradientsPass(RankPass):
    def before_steps(self) -> None:
        trainer, folder = self.measurement.subject.trainer, self.measurement.folder
        if trainer is not None and folder is not None:
            with self.measurement.log.run_phase("gradients"):
                write_gradients(trainer, folder)


def write_gradients(trainer: Trainer, folder: Path) -> None:
    """Run step 0 and let rank 0 write its gradients before the update; every rank must call it.

    The file has one float64 array per parameter, and also `loss`, `grad_norm` and `valid_tokens`.
    """
    loss_sum, valid_tokens = trainer.accumulate(0, trainer.cell.padded_len)
    # Copy the gradients before the update, in which clipping scales them in place.
    arrays: dict[str, Any] = {
        name: gradient.detach().double().cpu().numpy().copy()
        for name, gradient in trainer.engine.full_gradients()
    }
    total = loss_sum.double()
    dist.all_reduce(total)
    arrays["loss"] = float(total / valid_tokens.clamp(min=1))
    arrays |= {"grad_norm": float(trainer.engine.update()), "valid_tokens": int(valid_tokens)}
    if dist.get_rank() == 0:
        np.savez(folder / FILE_NAME, **arrays)


PASS = GradientsPass
