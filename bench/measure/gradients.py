"""Every full gradient of one step before any update, written for whoever wants to compare strategies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch.distributed as dist

from bench.config import RunConfig
from bench.training.trainers import NativeTrainer

FILE_NAME = "gradients.npz"


def write_gradients(trainer: NativeTrainer, cell: RunConfig, folder: Path) -> None:
    """Run all micro-steps of step 0 and let rank 0 write the gradients as float64, one array a parameter.

    Beside them stand `loss`, `grad_norm` and `valid_tokens`. The step is then finished as usual.
    """
    loss_sum, valid_tokens = trainer.accumulate(0, cell.seq_len)
    gradients = trainer.engine.full_gradients()
    total = loss_sum.double()
    dist.all_reduce(total)
    grad_norm = trainer.engine.update()
    if dist.get_rank() == 0:
        arrays = {name: grad.detach().double().cpu().numpy() for name, grad in gradients.items()}
        np.savez(
            folder / FILE_NAME,
            **arrays,
            loss=np.asarray(float(total / valid_tokens.clamp(min=1))),
            grad_norm=np.asarray(float(grad_norm)),
            valid_tokens=np.asarray(int(valid_tokens)),
        )
