"""Where parameters lie in a bank, how leaves are added, and what a rank owns: but for the last test no process, no group."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from ranks import run_ranks

import xtrain as xt
from xtrain.distributed import bank as banks
from xtrain.distributed.bank import ALIGN, BLOCK, Bank, Counter, add, buckets
from xtrain.distributed.owned import Owned

pytestmark = pytest.mark.on_cpu


def zeros(*sizes: int, dtype: xt.dtype = xt.float32) -> list[xt.Tensor]:
    return [xt.zeros(size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize("leaves", [1, 3, 4])
@pytest.mark.parametrize("whole", [False, True])
def test_pieces_are_whole_blocks(leaves: int, whole: bool) -> None:
    for sizes in ([0], [0, 0, 0], [1], [BLOCK], [BLOCK + 1], [3 * BLOCK - ALIGN, ALIGN], [5 * BLOCK, 7, 300]):
        one = Bank(zeros(*sizes), leaves, whole)
        assert one.length > 0 and one.length % (BLOCK * leaves) == 0
        assert all(at % ALIGN == 0 for at in one.offsets)
        taken = sorted((at, at + size) for at, size in zip(one.offsets, sizes) if size)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken)) and taken[-1:] <= [
            (one.length,) * 2
        ]
        piece = one.length // leaves
        found = [
            (s.parameter, s.end - s.begin) for i in range(leaves) for s in one.segments(i * piece, (i + 1) * piece)
        ]
        for number, size in enumerate(sizes):
            parts = [length for parameter, length in found if parameter == number]
            assert sum(parts) == size and all(parts) and (not whole or len(parts) <= 1)


def test_parameters_that_are_not_chosen_stay() -> None:
    one = Bank(zeros(3, 2), 1)
    one.write(xt.ones(one.length), [True, False])
    assert [parameter.tolist() for parameter in one.parameters] == [[1.0] * 3, [0.0] * 2]
    one.write(xt.full((one.length,), 2.0), [False, False])
    one.write(xt.full((one.length,), 3.0), [False, True])
    assert [parameter.tolist() for parameter in one.parameters] == [[1.0] * 3, [3.0] * 2]


def test_banks_begin_with_the_last_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, at least BUCKET elements each, but for the first; a bank ends as soon as it has them."""
    monkeypatch.setattr(banks, "BUCKET", 10)
    for sizes, cut in (
        ([4, 4, 4, 4, 4, 4, 4], [[4], [4, 4, 4], [4, 4, 4]]),
        ([10, 9, 1, 10], [[10], [9, 1], [10]]),
        ([1, 30, 2, 3, 20], [[1], [30, 2, 3], [20]]),
        ([3], [[3]]),
    ):
        parameters = zeros(*sizes)
        found = buckets(parameters)
        assert [[one.numel() for one in each] for each in found] == cut
        assert [id(one) for each in found for one in each] == [id(one) for one in parameters]


def test_a_part_that_is_strided_is_added() -> None:
    one = Bank(zeros(2), 1)
    strided = xt.ones(one.length, 2)[:, 0]
    assert add([strided, xt.ones(one.length)], one).tolist() == [2.0] * one.length
    assert strided.tolist() == [1.0] * one.length


@pytest.mark.parametrize("leaves", [1, 2, 4, 5, 9])
def test_one_leaf_is_packed_as_it_is_and_several_wide(leaves: int) -> None:
    """1 + 2^-9 is not a bfloat16: the sum of leaves keeps it, and is rounded once, by the optimizer."""
    one = Bank(zeros(2, 3, dtype=xt.bfloat16), 1)
    counter, numbers = Counter(one, leaves), [1.0, 2.0**-9] + [0.0] * leaves
    for number in numbers[:leaves]:
        counter.push([xt.full((size,), number, dtype=xt.bfloat16) for size in (2, 3)])
    found = counter.packed()
    assert found.dtype is (xt.bfloat16 if leaves == 1 else xt.float32) and found.shape == (one.length,)
    assert [part.tolist() for part in one.places(found)] == [[sum(numbers[:leaves])] * 2, [sum(numbers[:leaves])] * 3]
    assert found.float().sum().item() == 5 * sum(numbers[:leaves]), "zeros lie between"


@pytest.mark.parametrize("dtype", [xt.float16, xt.bfloat16, xt.float32, xt.float64])
def test_what_a_rank_owns(dtype: xt.dtype) -> None:
    """Masters of 16-bit parameters; a copy of others, unless one process changes them where they are."""
    adam, low = ("exp_avg", "exp_avg_sq"), dtype in (xt.float16, xt.bfloat16)
    wide = xt.float64 if dtype is xt.float64 else xt.float32
    one = Bank([xt.ones(BLOCK, dtype=dtype)], 2)
    alone, halves = Owned(one, 0, 1, adam), [Owned(one, rank, 2, adam) for rank in range(2)]
    assert (alone.values is None) == (not low)
    for own in (alone, *halves):
        assert own.has_masters == low and all(moment.dtype is wide for moment in own.moments.values())
        assert set(own.kept()) == {*adam, *(("master",) if low else ())}
        assert [part.dtype for part in own.now()] == [wide] * len(own.segments)
    assert [half.truth.tolist() for half in halves] == [[1.0] * BLOCK, [0.0] * BLOCK]
    assert [len(half.segments) for half in halves] == [1, 0]


HELD = """
import gc, sys
import xtrain as xt
from xtrain import nn, optim
from xtrain.distributed import DataParallel

xt.distributed.init()
dtype, name = getattr(xt, sys.argv[1]), sys.argv[2]


def held():
    gc.collect()
    return xt._C.memory_stats(xt._C.device("cpu"))["allocated"]


def bytes_of_state(averages):
    before = held()
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)), nn.LayerNorm(512)).to(dtype)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
    optimizer = optim.AdamW(model.parameters())
    if name == "muon":
        optimizer = optim.ChainedOptimizer([optim.Muon(matrices), optim.AdamW(vectors)])
    ema = optim.EMA(model.parameters(), 0.9, optimizer) if averages else None
    dp = DataParallel(model, optimizer, max_ranks=2, ema=ema)
    for step in range(2):
        for (rows,) in dp.leaves((xt.ones(4, 512, dtype=dtype),)):
            model(rows).square().sum().backward()
        dp.step()
    with dp.whole_optimizer():
        pass  # as a checkpoint does
    optimizer.zero_grad()
    return held() - before


print(bytes_of_state(True) - bytes_of_state(False), 4 * (8 * 512 * 512 + 2 * 512))
xt.distributed.shutdown()
"""


@pytest.mark.parametrize(("dtype", "name"), [("float32", "adamw"), ("bfloat16", "adamw"), ("bfloat16", "muon")])
def test_averages_are_shared_by_the_ranks(dtype: str, name: str, tmp_path: Path) -> None:
    """What a rank holds more with an EMA, after steps and a gathering for a checkpoint: 4 bytes a parameter on one process,
    half of that on each of two.
    """
    found = {}
    for size in (1, 2):
        said = run_ranks(size, ["-c", HELD, dtype, name], tmp_path / str(size))
        assert [one.status for one in said] == [0] * size, said
        found[size] = [tuple(map(int, one.out.split())) for one in said]
    ((alone, whole),) = found[1]
    more = 1.25  # zeros between, and blocks of memory, whose sizes are rounded up to an eighth of a power of two
    assert whole <= alone <= more * whole
    for half, _ in found[2]:
        assert whole / 2 <= half <= more * whole / 2
