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
    for read in (y.item, x.tolist, x.cpu, lambda: _C.stats(x)):
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
