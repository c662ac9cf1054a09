"""Run sound cells of small trained checkpoints, and print how near to a limit the checks of any cell are.

`python -m tests.support.sound_cells SEED ...` runs, for each seed, five strategies with three engines at two
lengths on three checkpoints: 90 cells, all of which should be `ok`, in some 12 minutes on two idle cores.
Then, and without a seed only, it prints how many checks of each reference folder compared nothing.
"""

import argparse
import email
import http
import math
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.measure import PASSES
from bench.measure.facts import ErrorFacts
from bench.record.record import Status
from bench.record.store import RECORDS, read_records
from bench.record.trajectory_noise import SIGNAL_NAMES, Deviation, movement_weight, signals_of, units
from tests.support.records import matches_of

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"
WIDE = {"hidden_size": 128, "intermediate_size": 320}
CHECKPOINTS = {
    "gqa": {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 8,
            "num_key_value_heads": 2, "tie_word_embeddings": True, **WIDE},
    "mqa": {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 1, "tie_word_embeddings": False, **WIDE},
    "deep": {"model_type": "qwen3", "num_hidden_layers": 6, "num_attention_heads": 4,
             "num_key_value_heads": 4, "tie_word_embeddings": True, "head_dim": 16, "hidden_size": 64,
             "intermediate_size": 160},
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CELLS = (
    "seq_len=512,2k", "strategy=local,ulysses,ring,deepspeed_ulysses,ring_flash_attn",
    "engine=ddp,zero3,fsdp2", "measure.repeats=1", "measure.steps=4", "measure.budget_s=4",
)  # fmt: skip
CELLS_PER_SWEEP = 30
QUANTITIES = ("parameter", "part", "task")
"""Fields of a comparison with another cell that name the quantity nearest to its limit."""


@dataclass(frozen=True)
class Share:
    """Error of a sound cell as a share of its limit."""

    check: str
    share: float
    quantity: str
    cell: str


def train_checkpoint(kind, folder, steps=250):
    """Train a model on the bytes of two packages of Python, and save it in bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(2)
    torch.manual_seed(23)
    sources = [
        path for package in (email, http) for path in sorted(Path(package.__file__).parent.glob("*.py"))
    ]
    text = "\n".join(path.read_text(errors="ignore") for path in sources).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    config = AutoConfig.for_model(
        vocab_size=256, max_position_embeddings=16384, rope_parameters=ROPE, **CHECKPOINTS[kind]
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - 257, (8,))
        ids = torch.stack([tokens[start : start + 256] for start in starts])
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)


def run_sound_cells(kind, seed, folder):
    """Run the cells of a checkpoint, which is trained unless the folder has it, and return their records."""
    checkpoint = folder / kind
    if not (checkpoint / "model.safetensors").exists():
        train_checkpoint(kind, checkpoint)
    sweep = Path(tempfile.mkdtemp(prefix=f"{kind}_seed{seed}_", dir=folder))
    words = ("model=checkpoint", f"model.path={checkpoint}", f"seed={seed}", f"sweep_dir={sweep}", *CELLS)
    subprocess.run([sys.executable, "run_sweep.py", "-m", *words], cwd=ROOT, check=False)
    return read_records(sweep / RECORDS)


def shares_of(records):
    """Yield every error of the records of a sweep as a share of its limit."""
    by_id = {record.cell_id: record for record in records}
    for record in records:
        for name, quantity, error, limit in _errors(record, by_id):
            share = math.inf if error is None else error / limit if error else 0.0
            yield Share(name, share, quantity, name_of(record))


def name_of(record):
    config = record.config
    keys = ("strategy", "engine", "seq_len", "seed")
    return " ".join(
        [Path(config.get("model.path") or config["model"]).name, *(str(config[key]) for key in keys)]
    )


def _errors(record, by_id):
    """Yield the check, the quantity, the error and the limit of everything that was compared."""
    for name, section in record.sections.items():
        if section is not None and isinstance(PASSES[name], ErrorFacts):
            yield from ((name, key, error, section.limits[key]) for key, error in section.errors.items())
    for name, match in matches_of(record):
        quantities = (f"{key} {getattr(match, key)}" for key in QUANTITIES if hasattr(match, key))
        yield name, " ".join(quantities), match.difference, match.limit
    losses = record.losses
    if losses is None or losses.compared_with is None:
        return
    steps, limit = losses.compared_steps, Deviation(**losses.compared_within)
    signals = signals_of(losses, steps)
    expected = signals_of(by_id[losses.compared_with].losses, steps)
    step_units = units(expected, movement_weight(record.config["dtype"], limit))
    for name in SIGNAL_NAMES:
        pairs = zip(getattr(signals, name), getattr(expected, name), step_units[name], strict=True)
        for step, (value, reference, unit) in enumerate(pairs):
            yield name, f"step {step}", abs(value - reference), getattr(limit, name) * unit


def lines_of(records, shares):
    """Return lines on the cells that are not `ok`, and on the largest share of each check."""
    wrong = [record for record in records if record.status is not Status.OK]
    largest = {}
    for share in sorted(shares, key=lambda share: share.share):
        largest[share.check] = share
    return [
        f"{len(records) - len(wrong)} of {len(records)} sound cells are ok",
        *(f"{name_of(record)}: {record.status}: {record.reason}" for record in wrong),
        "largest error as a share of its limit:",
        *(f"{one.check:15} {one.share:5.2f}  {one.cell}: {one.quantity}" for one in largest.values()),
    ]


def checks_line(name, records):
    """Return a line on the checks of a sweep that compared nothing, or whose limit would hide a mistake."""
    checks = [check for record in records for check in record.checks or ()]
    count = len(checks) or 1
    not_made = Counter(check.reason for check in checks if check.reason is not None and not check.steps)
    below = sum(check.below_noise is not None for check in checks)
    reason = f", most often: {not_made.most_common(1)[0][0]}" if not_made else ""
    return (
        f"{name}: {len(checks)} checks, {not_made.total() / count:.1%} not made, {below / count:.1%} below"
        f" noise{reason}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED")
    parser.add_argument(
        "--folder", type=Path, help="keep checkpoints and records here, and use checkpoints of it"
    )
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="sound_cells_"))
    folder.mkdir(parents=True, exist_ok=True)
    sweeps = [run_sound_cells(kind, seed, folder) for seed in arguments.seeds for kind in CHECKPOINTS]
    records = [record for sweep in sweeps for record in sweep]
    if sweeps:
        shares = [share for sweep in sweeps for share in shares_of(sweep)]
        print("\n".join(lines_of(records, shares)))
    for path in sorted(REFERENCE.rglob(RECORDS)):
        print(checks_line(path.parent.relative_to(REFERENCE), read_records(path)))
    expected = CELLS_PER_SWEEP * len(sweeps)
    sys.exit(sum(record.status is Status.OK for record in records) != expected)


if __name__ == "__main__":
    main()
