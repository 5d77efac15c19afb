"""The device meta: tensors with sizes and without values, for estimates."""

from __future__ import annotations

import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, nn
from xtrain.optable.table import bits

META = _C.device("meta")


def test_sizes_without_values() -> None:
    x = xt.ones((3, 5), device="meta").requires_grad_()
    y = (x @ xt.zeros((5, 2), device=META)).sum()
    y.backward()
    assert (y.shape, x.grad.shape, str(x.grad.device), x.device.type) == ((), (3, 5), "meta:0", "meta")
    assert xt.ones(4).to("meta").device == META == _C.device("meta", 0) != _C.device("meta:1")
    assert repr(x) == "tensor(..., shape=(3, 5), dtype=float32, device=meta:0, requires_grad=True)"
    assert repr(xt.ones(1001, device="meta:1")) == "tensor(..., shape=(1001,), dtype=float32, device=meta:1)"
    assert repr(xt.ones((0, 2), device=META)) == "tensor([], shape=(0, 2), dtype=float32, device=meta:0)"
    for read in (y.item, x.tolist, x.cpu, lambda: _C.stats(x), lambda: _C.compare(x, x, 0.0, 0.0)):
        with pytest.raises(RuntimeError, match="a tensor on meta has no values"):
            read()


def test_what_would_need_values_is_refused() -> None:
    x = xt.ones((3,), device="meta")
    for export in (x.__dlpack__, x.__dlpack_device__):
        with pytest.raises(BufferError, match="tensor must have values, got one on meta"):
            export()
    with pytest.raises(TypeError, match="must be on the CPU, got meta:0"):
        x.numpy()
    with pytest.raises(AttributeError, match="got float32 on meta:0"):
        _ = x.__cuda_array_interface__
    with pytest.raises(ValueError, match="must be 'cpu', 'cuda', 'cuda:<index>' or 'meta', got 'meta:2'"):
        _C.device("meta:2")
    with pytest.raises(ValueError, match=r"argument 'index' must be in \[0, 1\], got 2"):
        _C.device("meta", 2)
    with pytest.raises(ValueError, match="cuda: device must be a CUDA device, got 'meta'"):
        xt.cuda.synchronize("meta")


@pytest.mark.usefixtures("steady_memory")
@pytest.mark.on_cpu
def test_memory_is_that_of_the_cpu() -> None:
    """The same programs, the same bytes and storages, with and without rounding."""
    counts = {}
    for device in ("cpu", "meta"):
        before = _C.memory_stats(device)
        layer = nn.Linear(100, 37, device=device)
        x = xt.ones((19, 100), device=device)
        _C.memory_reset_peak(device)
        F.rms_norm(layer(x), (37,)).sum().backward()
        after = _C.memory_stats(device)
        counts[device] = [after[key] - before[key] for key in ("allocated", "live_storages", "live_tensors")]
        counts[device].append(after["peak"] - before["allocated"])
        del layer, x
        assert _C.memory_stats(device)["allocated"] == before["allocated"]
    assert counts["cpu"] == counts["meta"]


def test_rounding_of_a_gpu() -> None:
    for size, rounded in ((1, 512), (513, 1024), (5000, 5120), (9001, 9216), ((8 << 20) + 1, (8 << 20) + 512)):
        before = _C.memory_stats("meta:1")["allocated"]
        x = xt.empty((size,), dtype=xt.uint8, device="meta:1")
        assert _C.memory_stats("meta:1")["allocated"] - before == rounded
        del x


def test_work_is_counted() -> None:
    _C.meta_work(True)
    x, w = xt.ones((6, 10), device=META), xt.ones((10, 7), device=META)
    _C.meta_work(True)
    y = x @ w
    assert _C.meta_work() == {"flops": 2 * 6 * 10 * 7, "bytes": 0}
    _ = y + y
    assert _C.meta_work(True)["bytes"] == 3 * 4 * 6 * 7 and _C.meta_work() == {"flops": 0, "bytes": 0}
    q = xt.ones((2, 3, 8, 4), device=META)
    F.scaled_dot_product_attention(q, q, q)
    whole = _C.meta_work(True)["flops"]
    F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert whole == 2 * 2 * (2 * 3 * 8 * 8 * 4) == 2 * _C.meta_work(True)["flops"]
    _ = xt.ones((5, 4, 6, 10), device=META) @ xt.ones((5, 4, 10, 7), device=META)
    assert _C.meta_work(True)["flops"] == 5 * 4 * 2 * 6 * 10 * 7
    shared = xt.ones((5, 1, 6, 10), device=META).expand(5, 4, 6, 10)  # strides of two dimensions
    _C.meta_work(True)
    _ = shared @ xt.ones((5, 4, 10, 7), device=META)
    assert _C.meta_work(True)["flops"] == 5 * 4 * 2 * 6 * 10 * 7
    leaf = xt.ones((2, 3, 8, 4), device=META).requires_grad_()
    out = F.scaled_dot_product_attention(leaf, q, q)
    _C.meta_work(True)
    out.backward(q)
    assert _C.meta_work(True)["flops"] == whole // 2 * 5
    for work, moved in (
        (lambda: y + 1.0, 2 * 4 * 42),
        (lambda: y.clone(), 2 * 4 * 42),
        (lambda: _C.rms_norm(y, None), 2 * 4 * 42),
        (lambda: _C.add_rms_norm(y, y, None), 4 * 4 * 42),
        (lambda: y.amax(), 4 * (42 + 1)),
    ):
        work()
        assert _C.meta_work(True)["bytes"] == moved
    parameters = [xt.nn.Parameter(xt.ones(100, device=META, dtype=dtype)) for dtype in (xt.float32, xt.bfloat16)]
    optimizer = xt.optim.AdamW([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(parameters)])
    for p in parameters:
        p.grad = xt.ones(100, device=META, dtype=p.dtype)
    optimizer.step()  # makes the moments
    _C.meta_work(True)
    optimizer.step()
    assert _C.meta_work(True)["bytes"] == 100 * (3 * 4 + 16) + 100 * (3 * 2 + 24)


def moved(work) -> int:
    """The bytes that kernels would read and write."""
    _C.meta_work(True)
    work()
    return _C.meta_work(True)["bytes"]


def test_bytes_of_what_is_trained() -> None:
    """What a pass over memory takes: each operand once for reading, once for writing; gradients read what they need again."""
    x = xt.ones((6, 40), device=META, dtype=xt.bfloat16).requires_grad_()
    size, seeds = 2 * 6 * 40, x.detach()
    mask = 240  # bytes, which a comparison writes and where reads
    assert moved(lambda: xt.where(x.detach() > 0, seeds, seeds)) == size + mask + mask + 3 * size
    for call, forward, backward in (
        (lambda: F.silu(x), 2, 3),
        (lambda: F.softmax(x, 1), 2, 3),
        (lambda: F.swiglu(x, seeds), 3, 5),
        (lambda: F.layer_norm(x, (40,)), 2, 3),
    ):
        x.grad = None  # to which nothing is added
        _C.meta_work(True)
        y = call()
        assert _C.meta_work(True)["bytes"] == forward * size
        y.backward(seeds)
        assert _C.meta_work(True)["bytes"] == backward * size
    ids = xt.zeros((6,), dtype=xt.int64, device=META)
    table = xt.ones((100, 40), device=META).requires_grad_()
    rows, ones = F.embedding(ids, table), xt.ones((6, 40), device=META)
    assert moved(lambda: rows.backward(ones)) == 4 * (6 + 100) * 40
    x.grad, loss = None, F.cross_entropy(x, ids)
    assert moved(lambda: loss.backward()) >= 2 * size > moved(lambda: F.cross_entropy(seeds, ids))


def test_bytes_of_convolutions() -> None:
    x = xt.ones((2, 4, 20), device=META, dtype=xt.bfloat16).requires_grad_()
    w = xt.ones((4, 2, 3), device=META, dtype=xt.bfloat16).requires_grad_()  # two groups of two
    for wanted, passes in (((x,), 1), ((w,), 1), ((x, w), 2)):
        a, b = (t.detach().requires_grad_(any(t is one for one in wanted)) for t in (x, w))
        _C.meta_work(True)
        y = _C.conv1d(a, b, groups=2, algorithm="direct")
        once = {"flops": 2 * y.numel() * 2 * 3, "bytes": 2 * (x.numel() + w.numel() + y.numel())}
        assert _C.meta_work(True) == once
        y.backward(y.detach())
        assert _C.meta_work(True) == {name: passes * value for name, value in once.items()}
    columns = 2 * 4 * (20 + 3 * 18)  # x and what each tap sees of it
    assert moved(lambda: _C.conv1d(x, w.detach(), groups=2, algorithm="products")) == 2 * columns
    y = _C.conv1d(x, w.detach(), groups=2, algorithm="products")
    assert moved(lambda: y.backward(y.detach())) == 4 * columns  # which are added up in float32
    rows = xt.ones((2, 9, 8), device=META).requires_grad_()
    out = F.causal_conv1d(rows, xt.ones((8, 4), device=META))
    assert moved(lambda: out.backward(rows.detach())) == 3 * 4 * rows.numel()


def test_bytes_of_optimizers() -> None:
    """Of lists of tensors: the gradient twice where it is needed twice, state in and out."""
    narrow = [xt.ones((3, 5), device=META, dtype=xt.bfloat16) for _ in range(2)]
    wide = [xt.ones((3, 5), device=META) for _ in range(6)]
    rate = xt.tensor(0.1, dtype=xt.float64).to(META)
    numbers = xt.tensor([0.9, 0, 1, 1, 1, 1e-7, 1], dtype=xt.float64, device="cpu")
    direction = 30 * (2 * (2 + 4) + 4)  # g and b twice, x of float32
    for masters, written in (([], 2 * 2), (wide[2:4], 2 + 2 * 4)):  # p in and out, or the master in and out, and p
        work = lambda masters=masters: _C.muon_(narrow, narrow, wide[:2], masters, rate, numbers, True, 0, xt.float32)  # noqa: E731
        assert moved(work) == direction + 30 * (4 + 2 + 2 * 4 + written)
    step = xt.zeros((), dtype=xt.int64, device=META)
    assert moved(lambda: _C.ema_(wide[:2], narrow, step, 0.5)) == 30 * (2 + 2 * 4)
    assert moved(lambda: _C.foreach_copy_(wide[:2], wide[2:4])) == 2 * 4 * 30
    assert moved(lambda: _C.clip_grad_norm_(wide[:2], float("inf"))) == 4 * 30
    assert moved(lambda: _C.clip_grad_norm_(wide[:2], 1.0)) == (1 + 2) * 4 * 30
    assert moved(lambda: _C.tree_sum_(wide[0], [wide[1], narrow[0], wide[2]])) == 15 * (4 + 2 + 4 + 4)
    places, squares = xt.tensor([0], device="cpu"), xt.empty((1,), dtype=xt.float64, device=META)
    assert moved(lambda: _C.bank_sum_(None, wide[:2], places, squares)) == 2 * 4 * 15
    assert moved(lambda: _C.checksums(wide[:3])) == 3 * (4 * 15 + 8)


def test_every_kernel_is_there() -> None:
    assert all(_C.kernels("meta").values())


def test_weights_that_lie_together() -> None:
    """Addresses tell it, as on a device with memory."""
    first, second = _C.pack([xt.ones((4, 8), device=META), xt.ones((2, 8), device=META)])
    assert first.adjoins(second) and not second.adjoins(first)


def test_random_numbers_are_those_of_other_devices() -> None:
    """A fill on meta takes its number from the generator, as any other."""
    xt.manual_seed(0)
    xt.rand((4,), device="meta")
    after = xt.rand((4,))
    xt.manual_seed(0)
    xt.rand((4,))
    assert bits(after) == bits(xt.rand((4,)))
