"""The weights pass on a rank: after the last step rank 0 writes the model as a checkpoint of transformers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from bench.measure.rank_pass import RankPass
from bench.measure.weights.section import FOLDER_NAME
from bench.ranks.progress_bars import use_thread_lock


class WeightsPass(RankPass):
    def part(self) -> None:
        trainer, folder = self.measurement.subject.trainer, self.measurement.folder
        if trainer is None or folder is None or dist.get_rank() != 0:
            return
        with self.measurement.log.run_phase("weights"):
            use_thread_lock()
            model = trainer.cell.model
            network: Any = self.measurement.subject.network
            # The length of the training; that of random weights is only meant for later.
            trained_len = 0 if model.path is None else model.trained_len or 0
            network.model.config.max_position_embeddings = max(trainer.cell.seq_len, trained_len)
            network.model.save_pretrained(folder / FOLDER_NAME.format(strategy=trainer.cell.strategy))


PASS = WeightsPass
