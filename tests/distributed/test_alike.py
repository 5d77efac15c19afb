"""DataParallel on ranks that were given other models, optimizers or numbers: refused, with the difference named."""

from __future__ import annotations

import pytest
from ranks import RANK, run_ranks

pytestmark = pytest.mark.on_cpu

LOOP = (
    RANK
    + """
rank = xt.distributed.rank()

class Two(nn.Module):
    def __init__(self, names, rows=4):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, rows, bias=False))

    def forward(self, x):
        return self.b(self.a(x))

def train(names="ab", rows=4, optimizer=optim.AdamW, steps=1, clip=1.0, ema=False, act=lambda optimizer, step: None, own={}, **options):
    model = Two(names, rows)
    made = optimizer(model.parameters(), **options)
    dp = xt.distributed.DataParallel(model, made, ema=optim.EMA(model.parameters(), 0.5) if ema else None, **own)
    for step in range(steps):
        act(made, step)
        for (x,) in dp.leaves((xt.ones(2, 4),)):
            model(x).square().sum().backward()
        dp.step(clip=clip)

def later(optimizer, step):
    if step == 1 and rank:
        optimizer.param_groups[0]["lr"] = 0.5

def frozen(optimizer, step):
    optimizer.param_groups[0]["params"][0].requires_grad_(not rank)

"""
)


SAME = "must be the same on every rank, got"
A = "'float32 (4, 4), place 0, group 0 of AdamW'"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            'names="ba" if rank else "ab"',
            f"parameter a.weight {SAME} {A} on rank 0 and {A.replace('place 0', 'place 1')} on",
        ),
        ("rows=4 + 4 * rank", f"parameter a.weight {SAME} {A} on rank 0 and {A.replace('4, 4', '8, 4')} on rank 1"),
        (
            'names="ab" + "c" * rank',
            f"parameter c.weight {SAME} None on rank 0 and {A.replace('place 0', 'place 2')} on",
        ),
        (
            "optimizer=optim.Muon if rank else optim.AdamW",
            f"parameter a.weight {SAME} {A} on rank 0 and {A[:-6]}Muon' on",
        ),
        ("ema=bool(rank)", f"decay of ema {SAME} 'none' on rank 0 and '0.5' on rank 1"),
        ("weight_decay=0.5 * rank", f"weight_decay of group 0 {SAME} '0.0' on rank 0 and '0.5' on rank 1"),
        ("steps=3, act=later, lr=0.25", f"lr of group 0 {SAME} '0.25' on rank 0 and '0.5' on rank 1"),
        ('own={"overlap": not rank}', f"overlap {SAME} 'True' on rank 0 and 'False' on rank 1"),
        ('own={"max_ranks": 2 + 2 * rank}', f"max_ranks {SAME} '2' on rank 0 and '4' on rank 1"),
        ("act=frozen", f"parameter a.weight {SAME} {A} on rank 0 and {A[:-1]}, frozen' on rank 1"),
    ],
)
def test_ranks_that_are_not_alike(call, said, tmp_path):
    """Each would train another model, or its piece in another way, which exchanges then bring to all ranks."""
    times = {"XTRAIN_WATCH_TIMES": "hashes=1"}
    found = run_ranks(2, ["-c", f"{LOOP}train({call})"], tmp_path, lambda rank: times)
    for one in found:
        assert one.status == 1 and f"ConfigError: distributed: DataParallel: {said}" in one.err, found
        assert "left: " not in one.err, found  # nobody has to hear of it


def test_clipping_must_be_alike(tmp_path):
    """Each rank multiplies its piece of the gradients itself."""
    found = run_ranks(2, ["-c", f"{LOOP}train(clip=0.5 + 0.25 * rank)"], tmp_path)
    for one in found:
        assert one.status == 75 and "ranks do not do the same: exchange" in one.err, found
        assert "squares, clip 0.5 " in one.err and "squares, clip 0.75 " in one.err, found
