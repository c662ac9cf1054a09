"""What `--plan` of predicted cells answers: which degrees the heads allow, and what fits on which device."""

import re

import pytest

from tests.command import typed_here

PREDICTED = ("--plan", "-m", "mode=predict")
REFUSED = [
    ("40 query and 8 KV heads", 16, "1, 2, 4, 8, 40"),
    ("14 query and 2 KV heads", 4, "1, 2, 14"),
    ("14 query and 2 KV heads", 16, "1, 2, 14"),
]
"""What `ulysses` cannot split of three models at 4 and 16 ranks: as `experiment=head_limits` had it."""


def test_the_heads_of_a_model_refuse_a_degree_with_the_reason_and_the_legal_ones(tmp_path):
    words = ("hardware=h100_80gb", "cluster.world_size=16", "strategy=ulysses,usp,ring", "sp_degree=4,16")
    done = typed_here(tmp_path, *PREDICTED, *words, "model=qwen3_4b,qwen3_14b,qwen2_5_0_5b", "seq_len=64k")
    assert done.returncode == 0, done.stderr
    assert "plan of 18 cells" in done.stdout
    reasons = re.findall(r"^\[\d\] (\w+ cannot split .*)$", done.stdout, flags=re.MULTILINE)
    assert {*reasons} == {
        f"ulysses cannot split {heads} evenly over sp_degree={degree} ranks; choose sp_degree from {degrees},"
        " or a ring strategy"
        for heads, degree, degrees in REFUSED
    }
    assert len(reasons) == len(REFUSED)


VERDICTS = {
    ("rtx_4090", 4, "deepspeed_ulysses"): {"64k": "undecided", "96k": "does not fit"},
    ("a100_40gb", 4, "ring_flash_attn"): {"128k": "fits", "256k": "does not fit"},
}
"""Of Qwen3-4B, by device, number of them and strategy: as `experiment=memory_fit` had it."""


@pytest.mark.parametrize(("hardware", "ranks", "strategy"), VERDICTS)
def test_what_a_rank_needs_fits_is_undecided_or_does_not_fit(tmp_path, hardware, ranks, strategy):
    expected = VERDICTS[hardware, ranks, strategy]
    words = (f"hardware={hardware}", f"cluster.world_size={ranks}", f"strategy={strategy}")
    done = typed_here(tmp_path, *PREDICTED, *words, f"seq_len={','.join(expected)}")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\w+ (\d+k)\b.*  (fits|undecided|does not fit)\b", done.stdout, flags=re.MULTILINE)
    assert dict(rows) == expected
