"""The probe pass on a rank: it changes single tokens in a cut of the cell's model, and compares losses.

The cut has two layers and a small vocabulary. Shapes: B sequences, S tokens of this rank's shard, T tokens of
a sequence, V vocabulary size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from bench.attention.documents import Documents
from bench.config import LOW_PRECISION, Cell, DataConfig
from bench.measure.parity.exact import PLAIN_NAME, plain_attention_installed
from bench.measure.parity.rank import parity_len
from bench.measure.parity.section import parity_limit
from bench.measure.probe.leaks import TokenPlaces, choose_changes, count_moved, model_parts
from bench.measure.probe.section import EXPERIMENT, Moved, ProbeSection, why_wrong
from bench.measure.rank_pass import RankPass
from bench.ranks.log import WrongResultError
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import IGNORED_LABEL, Batch, Strategy, Wiring
from bench.training.data import open_data
from bench.training.models import TORCH_DTYPES, build_model

CUT_LAYERS = 2
CUT_VOCABULARY = 512


def cut_cell(cell: Cell, seq_len: int) -> Cell:
    """Return the cell with a two-layer model, a small vocabulary, a narrow MLP and random weights."""
    model = replace(
        cell.model,
        path=None,
        num_layers=CUT_LAYERS,
        vocab_size=min(cell.model.vocab_size, CUT_VOCABULARY),
        intermediate_size=min(cell.model.intermediate_size, cell.model.hidden_size),
    )
    data = DataConfig(name="synthetic", path=None, tokenizer=None, prompt_tokens=0, packing=cell.data.packing)
    return replace(cell, model=model, data=data, seq_len=seq_len, padding=0, checkpointing=False)


Ordered = TypeVar("Ordered", float, tuple[float, int])


class ProbePass(RankPass):
    section: ProbeSection | None = None

    def before_steps(self) -> None:
        """Run the probe if the cell's experiment is `probe`; raise WrongResultError if it finds a fault."""
        trainer = self.measurement.subject.trainer
        if trainer is None or trainer.cell.experiment != EXPERIMENT:
            return
        with self.measurement.log.run_phase("probe"), without_memory_limit():
            self.section = probe(trainer.strategy, trainer.wiring, self.measurement.subject.device)
            wrong = why_wrong(self.section)
            if wrong is not None:  # every rank raises, because all ranks have the same sums
                raise WrongResultError(wrong)

    def part(self) -> ProbeSection | None:
        return self.section


def probe(strategy: Strategy, wiring: Wiring, device: torch.device) -> ProbeSection:
    """Probe the cut model and return the section, equal on all ranks; every rank must call it."""
    tokens = parity_len(strategy)
    cell = cut_cell(strategy.cell, tokens)
    model = build_model(
        cell.model, attention_name=wiring.attention_name, max_positions=tokens, seed=cell.seed
    )
    model = model.to(device, TORCH_DTYPES["fp64" if cell.dtype == "fp64" else "fp32"]).train()
    whole = open_data(cell, device).micro_batch(0, 0, 0, tokens)
    places = places_of(whole)
    changes = choose_changes(places)
    batch = strategy.shard(whole) if wiring.shards_batch else whole
    local = TokenPlaces(
        documents=_local_tokens(strategy, wiring, places.documents),
        positions=_local_tokens(strategy, wiring, places.positions),
    )
    named = {"position_ids": batch.position_ids}
    with strategy.step(batch), _autocast(cell, device):
        counts, noise = count_moved(model_parts(model, batch.input_ids, named), local, changes)
        with torch.no_grad():
            losses_BS = position_losses(model, batch)
    exact_BT, plain_BT = reference_losses(model, whole, cell, device)
    deviation_BS = losses_BS - _local_tokens(strategy, wiring, exact_BT)
    error, position = _max_over_ranks(_largest_error(deviation_BS, exact_BT, local.positions))
    plain_error, _ = _largest_error(plain_BT - exact_BT, exact_BT, places.positions)
    return ProbeSection(
        tokens=tokens,
        documents=int(places.documents.max()) + 1,
        changes=len(changes),
        moved=sum_over_ranks(counts, dist.group.WORLD),
        noise=_max_over_ranks(noise),
        loss_error=error,
        loss_position=position,
        loss_limit=parity_limit("loss", cell.dtype, plain_error),
    )


def places_of(batch: Batch) -> TokenPlaces:
    """Return each token's document and position. Without packing, a sequence is one document."""
    sequences, tokens = batch.input_ids.shape
    documents = batch.documents or Documents(((tokens,),) * sequences)
    lengths = [len(document) for row in range(sequences) for document in documents.positions_of(row)]
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    device = batch.input_ids.device
    return TokenPlaces(
        numbers.view(sequences, tokens).to(device), torch.arange(tokens, device=device).expand(sequences, -1)
    )


def position_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return each token's loss, [B, S], in float64; 0 for a label that does not count."""
    decoder = model.get_decoder()
    hidden = decoder(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    ).last_hidden_state
    logits_BSV = model.get_output_embeddings()(hidden).double()
    return cross_entropy(
        logits_BSV.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    ).view(batch.labels.shape)


def reference_losses(
    model: PreTrainedModel, whole: Batch, cell: Cell, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the losses of whole sequences on one device in float64 and in the cell's dtype, both [B, T]."""
    with plain_attention_installed() as attention, torch.no_grad():
        attention.documents = whole.documents
        reference = copy.deepcopy(model)
        reference.config._attn_implementation = PLAIN_NAME
        with _autocast(cell, device):
            plain = position_losses(reference, whole)
        return position_losses(reference.double(), whole), plain


def _local_tokens(strategy: Strategy, wiring: Wiring, whole_BT: Tensor) -> Tensor:
    """Return the values of this rank's tokens, [B, S], or all of them if the batch is not sharded."""
    if not wiring.shards_batch:
        return whole_BT
    return torch.cat([whole_BT[:, piece] for piece in strategy.slices(whole_BT.shape[1])], dim=1)


def _autocast(cell: Cell, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, TORCH_DTYPES[cell.dtype], enabled=cell.dtype in LOW_PRECISION)


def _largest_error(deviation: Tensor, exact: Tensor, positions: Tensor) -> tuple[float, int]:
    """Return the largest error, relative to the mean loss, and the position of it; nan counts as infinite."""
    deviation = deviation.abs().nan_to_num(nan=torch.inf)
    return float(deviation.max() / exact.mean()), int(positions.flatten()[deviation.argmax()])


def sum_over_ranks(counts: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Moved]:
    """Return the sum of counts over the ranks of a group, by kind of part; every rank must call it.

    Without a group it returns this rank's counts.
    """
    totals = {kind: row.clone() for kind, row in counts.items()}
    for total in totals.values() if group is not None else ():
        dist.all_reduce(total, group=group)
    names = Moved.__struct_fields__
    return {kind: Moved(**dict(zip(names, row.tolist(), strict=True))) for kind, row in totals.items()}


def _max_over_ranks(value: Ordered) -> Ordered:
    """Return the largest value of any rank; every rank must call it."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


PASS = ProbePass
