"""Every full gradient of one step before any update, written to a file to compare strategies by."""

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
            with self.measurement.log.during("gradients"):
                write_gradients(trainer, folder)


def write_gradients(trainer: Trainer, folder: Path) -> None:
    """Run all micro-steps of step 0 and let rank 0 write the gradients as float64, one array a parameter.

    Beside them stand `loss`, `grad_norm` and `valid_tokens`. The step is then finished as usual.
    """
    loss_sum, valid_tokens = trainer.accumulate(0, trainer.cell.padded_len)
    # Copied now: clipping scales gradients in place.
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
