"""Tensors against NumPy: memory that is shared both ways, indexing, broadcasting, promotion, printing - and hostile arguments."""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import operator
import pickle
import weakref

import ml_dtypes
import numpy as np
import pytest
from runs import python

import xtrain as xt
from xtrain import _C
from xtrain.optable.table import array

DTYPES = ["float32", "float64", "float16", "int32", "int64", "uint8", "bool"]
rng = np.random.default_rng(7)


def values(dtype: str, *shape: int) -> np.ndarray:
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return (
        rng.standard_normal(shape).astype(dtype)
        if dtype.startswith("float")
        else rng.integers(0, 100, shape).astype(dtype)
    )


# ---- NumPy ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_numpy_shares_memory(dtype: str) -> None:
    a = values(dtype, 3, 4)
    t = xt.from_numpy(a)
    assert (t.shape, t.dtype.name, t.stride(), t.data_ptr()) == ((3, 4), dtype, (4, 1), a.ctypes.data)
    a[1, 2] = 1
    assert t[1, 2].item() == 1
    t[0, 0] = 0
    assert a[0, 0] == 0
    assert np.array_equal(t.numpy(), a)


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_shares_memory(dtype: str) -> None:
    t = xt.tensor(values(dtype, 3, 4))
    for a in (
        t.numpy(),
        np.asarray(t),
        np.array(t, copy=None) if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else np.asarray(t),
    ):
        assert a.ctypes.data == t.data_ptr()
        assert a.dtype == dtype
    view = t.transpose(0, 1)[1:, ::2]
    assert view.numpy().ctypes.data == view.data_ptr()
    assert np.array_equal(view.numpy(), t.numpy().T[1:, ::2])


@pytest.mark.on_cpu
def test_copies_where_a_copy_is_asked_for() -> None:
    t = xt.tensor(values("float32", 3))
    a = np.array(t)
    a[0] = 99
    assert t[0].item() != 99
    assert np.asarray(t, dtype=np.float64).dtype == np.float64
    b = values("float32", 3)
    u = xt.tensor(b)
    b[0] = 99
    assert u[0].item() != 99
    with pytest.raises(ValueError, match="cop"):
        np.array(t, dtype=np.float64, copy=False)


@pytest.mark.on_cpu
def test_strided_arrays() -> None:
    a = np.arange(60.0).reshape(3, 4, 5)
    for view in (a.T, a[::2, 1:, ::3], a[:, :0], np.broadcast_to(np.arange(3.0), (4, 3)), a[1, 2, 3]):
        if view.flags.writeable and isinstance(view, np.ndarray):
            assert np.array_equal(xt.from_numpy(view).numpy(), view)
        assert np.array_equal(xt.tensor(view).numpy(), view)


def test_what_from_numpy_refuses() -> None:
    with pytest.raises(ValueError, match="negative|stride"):
        xt.from_numpy(np.arange(5.0)[::-1])
    with pytest.raises((TypeError, ValueError), match=r"complex|dtype"):
        xt.from_numpy(np.zeros(3, np.complex64))
    with pytest.raises((TypeError, ValueError)):
        xt.from_numpy(np.zeros(3, object))
    with pytest.raises((TypeError, ValueError)):
        xt.from_numpy(np.zeros(3, ">f4"))
    with pytest.raises((TypeError, ValueError)):
        xt.from_numpy(np.zeros(3, "S4"))
    with pytest.raises(TypeError):
        xt.from_numpy([1, 2])
    with pytest.raises(ValueError, match="8"):
        xt.from_numpy(np.zeros((1,) * 9))
    record = np.zeros(4, [("a", "u1"), ("b", "<f4")])["b"]  # strides of 5 bytes are no multiple of 4
    with pytest.raises(ValueError):
        xt.from_numpy(record)
    misaligned = np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float32)
    try:
        t = xt.from_numpy(misaligned)
    except ValueError:
        pass
    else:
        assert (t + 1).tolist() == [1, 1, 1, 1]
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    try:
        t = xt.from_numpy(frozen)
    except (ValueError, TypeError):
        pass
    else:  # shared read-only memory may never be written
        with pytest.raises((RuntimeError, ValueError)):
            t.add_(1)
        assert frozen.tolist() == [0, 0, 0]
    assert xt.tensor(np.arange(5.0)[::-1].copy()).tolist() == [4, 3, 2, 1, 0]


def test_negative_strides_copy_through_tensor() -> None:
    assert xt.tensor(np.arange(5.0)[::-1]).tolist() == [4, 3, 2, 1, 0]
    assert xt.tensor(np.arange(6).reshape(2, 3)[:, ::-1]).tolist() == [[2, 1, 0], [5, 4, 3]]


def test_lifetimes() -> None:
    a = np.arange(1000.0)
    ref = weakref.ref(a)
    t = xt.from_numpy(a)[10:20]
    del a
    gc.collect()
    assert ref() is not None
    assert t.tolist() == list(range(10, 20))
    b = t.numpy()
    del t
    gc.collect()
    assert b.tolist() == list(range(10, 20))
    del b
    gc.collect()
    assert ref() is None


@pytest.mark.on_cpu
def test_numpy_of_a_tensor_that_requires_grad() -> None:
    t = xt.tensor(np.ones(3), requires_grad=True)
    with pytest.raises(RuntimeError, match="detach"):
        t.numpy()
    with pytest.raises(RuntimeError, match="detach"):
        np.asarray(t)
    assert t.detach().numpy().tolist() == [1, 1, 1]


@pytest.mark.on_cpu
def test_bfloat16_crosses_with_ml_dtypes() -> None:
    t = xt.tensor(np.array([1.0, -2.5, 3e38])).to(xt.bfloat16)
    a = t.numpy()
    assert a.dtype == ml_dtypes.bfloat16
    assert a.astype(np.float64).tolist() == array(t).tolist()
    back = xt.from_numpy(a)
    assert back.dtype is xt.bfloat16
    assert back.data_ptr() == t.data_ptr()


def test_bfloat16_without_ml_dtypes_is_a_clear_error() -> None:
    code = "import sys; sys.modules['ml_dtypes'] = None\nimport xtrain as xt\ntry:\n xt.zeros(2, dtype=xt.bfloat16).numpy()\nexcept Exception as e:\n print(type(e).__name__, e)"
    out = python("-c", code).stdout
    assert "ml_dtypes" in out


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_buffer_protocol(dtype: str) -> None:
    t = xt.tensor(values(dtype, 3, 4))
    m = memoryview(t)
    assert (m.shape, m.itemsize, m.readonly) == ((3, 4), t.itemsize, False)
    assert np.array_equal(np.asarray(m), t.numpy())
    assert np.asarray(m).ctypes.data == t.data_ptr()
    m.release()
    column = memoryview(t[:, 1])
    assert column.strides == (4 * t.itemsize,)
    assert np.array_equal(np.asarray(column), t.numpy()[:, 1])
    with pytest.raises((BufferError, TypeError)):
        bytes_view = ctypes.c_char * 12
        bytes_view.from_buffer(t.transpose(0, 1))


def test_numpy_functions_and_operators_do_not_copy_silently() -> None:
    t, a = xt.tensor(np.ones(3)), np.ones(3)
    for f in (operator.add, operator.mul, operator.sub):
        try:
            out = f(a, t)
        except TypeError:
            continue
        assert isinstance(out, xt.Tensor)


# ---- DLPack ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_both_ways(dtype: str) -> None:
    t = xt.tensor(values(dtype, 3, 4))
    a = np.from_dlpack(t)
    assert a.ctypes.data == t.data_ptr()
    assert np.array_equal(a, t.numpy())
    b = values(dtype, 4, 3).T
    u = xt.from_dlpack(b)
    assert (u.data_ptr(), u.shape) == (b.ctypes.data, (3, 4))
    assert np.array_equal(u.numpy(), b)
    assert t.__dlpack_device__() == (1, 0)


@pytest.mark.on_cpu
def test_dlpack_capsules() -> None:
    t = xt.tensor(np.arange(6.0).reshape(2, 3))
    capsule = t.__dlpack__()
    assert "dltensor" in repr(capsule)
    u = xt.from_dlpack(t)
    assert u.data_ptr() == t.data_ptr()
    versioned = t.__dlpack__(max_version=(1, 0))
    assert "dltensor_versioned" in repr(versioned)
    del capsule, versioned  # never consumed: the destructor frees them
    gc.collect()
    with pytest.raises(BufferError):
        t.__dlpack__(dl_device=(2, 0))
    with pytest.raises((BufferError, RuntimeError, ValueError)):
        xt.tensor(np.ones(2), requires_grad=True).__dlpack__()
    with pytest.raises((TypeError, AttributeError)):
        xt.from_dlpack(5)
    with pytest.raises((TypeError, ValueError, BufferError)):
        xt.from_dlpack(np.zeros(2, np.complex128))
    copied = xt.from_dlpack(np.from_dlpack(t))
    assert copied.tolist() == t.tolist()


def test_dlpack_capsule_is_consumed_once() -> None:
    class Fake:
        def __init__(self, capsule):
            self.capsule = capsule

        def __dlpack__(self, **_):
            return self.capsule

        def __dlpack_device__(self):
            return (1, 0)

    fake = Fake(xt.tensor(np.arange(3.0)).__dlpack__())
    assert xt.from_dlpack(fake).tolist() == [0, 1, 2]
    with pytest.raises((BufferError, ValueError, TypeError)):
        xt.from_dlpack(fake)
    for bad in (None, 5, object()):
        with pytest.raises((BufferError, ValueError, TypeError)):
            xt.from_dlpack(Fake(bad))


# ---- making tensors -----------------------------------------------------------------------------------------------------------------


def test_tensor_from_python_data() -> None:
    cases = [
        (3, "int64", ()),
        (3.5, "float32", ()),
        (True, "bool", ()),
        ([1, 2], "int64", (2,)),
        ([1, 2.5], "float32", (2,)),
        ([[1], [2]], "int64", (2, 1)),
        ([True, False], "bool", (2,)),
        ([], "float32", (0,)),
        ([[], []], "float32", (2, 0)),
        ((1, 2), "int64", (2,)),
        (np.float64(2), "float64", ()),
        (np.arange(3, dtype=np.uint8), "uint8", (3,)),
    ]
    for data, dtype, shape in cases:
        t = xt.tensor(data)
        assert (t.dtype.name, t.shape) == (dtype, shape), data
    assert xt.tensor([1, 2], dtype=xt.float32).tolist() == [1.0, 2.0]
    assert xt.tensor([1.7, -1.7], dtype=xt.int64).tolist() == [1, -1]
    big = 2**53 + 1  # beside a fraction: no integer becomes a float on its way
    for data in ([big, 1.5, True], [[1.5, True, big]], [np.float32(1.5), np.int64(big), xt.tensor(True)]):
        assert sorted(np.ravel(xt.tensor(data, dtype=xt.int64).tolist())) == [1, 1, big]
    assert xt.tensor([2, 0.5, 0], dtype=xt.bool).tolist() == [True, True, False]
    assert xt.tensor([big, 1.5]).dtype is xt.float32
    for bad in ([[1, 2], [3]], ["a"], [None], object(), [1, [2]], {1: 2}, 1j):
        with pytest.raises((TypeError, ValueError)):
            xt.tensor(bad)
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises((ValueError, TypeError, RecursionError)):
        xt.tensor(cycle)
    with pytest.raises((OverflowError, ValueError)):
        xt.tensor(2**70)


def test_creation_functions() -> None:
    assert xt.zeros(2, 3).tolist() == [[0.0] * 3] * 2
    assert xt.ones((2,), dtype=xt.int64).tolist() == [1, 1]
    assert xt.full((2,), 7).dtype is xt.int64
    assert xt.arange(5).tolist() == [0, 1, 2, 3, 4]
    assert xt.arange(1, 2, 0.25).tolist() == [1, 1.25, 1.5, 1.75]
    assert xt.empty(0, 5).shape == (0, 5)
    assert xt.zeros_like(xt.ones(2, dtype=xt.uint8)).dtype is xt.uint8
    assert xt.zeros(2, requires_grad=True).requires_grad
    assert xt.zeros(()).item() == 0.0


# ---- indexing -----------------------------------------------------------------------------------------------------------------------


def random_index(shape: tuple[int, ...]) -> tuple:
    """A random basic index: integers, slices with positive steps, an ellipsis, new axes."""
    index: list = []
    for n in shape[: rng.integers(0, len(shape) + 1)]:
        kind = rng.integers(0, 4)
        if kind == 0 and n > 0:
            index.append(int(rng.integers(-n, n)))
        else:
            ends = [None, *range(-n - 2, n + 3)]
            index.append(
                slice(
                    ends[rng.integers(len(ends))],
                    ends[rng.integers(len(ends))],
                    [None, 1, 2, 3, n + 1][rng.integers(5)],
                )
            )
    if rng.integers(0, 3) == 0:
        index.insert(int(rng.integers(0, len(index) + 1)), None)
    if rng.integers(0, 3) == 0:
        used = sum(i is not None for i in index)
        tail = [slice(None)] * int(rng.integers(0, len(shape) - used + 1))
        return (Ellipsis, *tail) if not index else (*index, Ellipsis)
    return tuple(index)


def test_slicing_like_numpy() -> None:
    for _ in range(1500):
        shape = tuple(int(n) for n in rng.integers(0, 6, rng.integers(0, 5)))
        a = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        t = xt.from_numpy(a)
        index = random_index(shape)
        want, got = a[index], t[index]
        assert got.shape == np.shape(want), (shape, index)
        assert np.array_equal(got.numpy(), want), (shape, index)
        if got.numel():
            assert got.data_ptr() == (
                want.ctypes.data if isinstance(want, np.ndarray) else t.data_ptr() + int(want) * 8
            ), "basic indexing may not copy"


def test_assignment_like_numpy() -> None:
    for _ in range(400):
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
        a, index = np.zeros(shape), random_index(shape)
        t = xt.zeros(*shape, dtype=xt.float64)
        value = (
            rng.standard_normal(a[index].shape[-1:])
            if a[index].ndim and rng.integers(2)
            else float(rng.standard_normal())
        )
        a[index] = value
        t[index] = xt.tensor(value) if isinstance(value, np.ndarray) else value
        assert np.array_equal(t.cpu().numpy(), a), (shape, index)


def test_index_errors() -> None:
    t = xt.zeros(3, 4)
    for index, kind in [
        (3, IndexError),
        (-4, IndexError),
        ((0, 4), IndexError),
        ((0, 0, 0), IndexError),
        (2**70, (IndexError, OverflowError)),
        ("a", (TypeError, IndexError)),
        (1.5, (TypeError, IndexError)),
        ((..., ...), IndexError),
        (slice(None, None, 0), ValueError),
        (slice(None, None, -1), ValueError),
        (slice("a", None), TypeError),
        ((None,) * 9, (IndexError, ValueError)),
    ]:
        with pytest.raises(kind):
            t[index]
        with pytest.raises(kind):
            t[index] = 1.0
    with pytest.raises((IndexError, TypeError)):
        xt.zeros(())[0]
    with pytest.raises((ValueError, RuntimeError), match=r"\(5,\)"):
        t[0] = xt.zeros(5)
    with pytest.raises(TypeError):
        t[0] = "a"
    with pytest.raises(TypeError):
        del t[0]

    class Raising:
        def __index__(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        t[Raising()]
    with pytest.raises(ZeroDivisionError):
        t[Raising() :]
    with pytest.raises(ZeroDivisionError):
        xt.zeros(Raising(), 2) if False else _C.full((Raising(),), 0.0, xt.float32)
    assert t.tolist() == [[0.0] * 4] * 3


def test_an_index_whose_result_has_eight_dimensions() -> None:
    """Dimensions that the index takes away make room for those that it adds, wherever they stand."""
    array = np.arange(2**6).reshape(2, 2, 1, 2, 2, 2, 2)
    x = xt.tensor(array)
    for key in ((None, None, 0), (None, None, ..., 1), (None, None, slice(1), None, 0, ..., 0)):
        assert x[key].ndim == 8 and x[key].tolist() == array[key].tolist()


def test_index_that_resizes_nothing() -> None:
    """An __index__ with side effects may not leave a view that points outside."""
    t = xt.zeros(4)

    class Sneaky:
        def __index__(self):
            gc.collect()
            return 2

    assert t[Sneaky()].shape == ()
    assert t[Sneaky() :].shape == (2,)


def test_iteration_and_len() -> None:
    t = xt.arange(6).reshape(3, 2)
    assert len(t) == 3
    assert [row.tolist() for row in t] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(TypeError):
        len(xt.zeros(()))
    with pytest.raises(TypeError):
        iter(xt.zeros(()))
    assert list(xt.zeros(0)) == []


# ---- shapes -------------------------------------------------------------------------------------------------------------------------


def test_views_share_memory() -> None:
    t = xt.arange(24).reshape(2, 3, 4)
    for view in (
        t.view(6, 4),
        t.view(-1),
        t.reshape(4, 6),
        t.transpose(0, 2),
        t.permute(2, 0, 1),
        t[1:],
        t.unsqueeze(0),
        t.squeeze(),
        t.expand(5, 2, 3, 4),
        t.detach(),
        t.T if t.ndim == 2 else t.mT,
    ):
        assert view.data_ptr() in (t.data_ptr(), t[1:].data_ptr())
    assert t.transpose(0, 1).is_contiguous() is False
    assert t.transpose(0, 1).contiguous().is_contiguous()
    assert t.contiguous().data_ptr() == t.data_ptr()
    assert t.transpose(0, 1).reshape(-1).data_ptr() != t.data_ptr()
    assert t.reshape((3, 8)).shape == t.reshape(3, 8).shape == (3, 8)


def test_reshape_like_numpy() -> None:
    """A view exactly when NumPy can make one without a copy."""
    for _ in range(300):
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4], rng.integers(1, 4)))
        order = tuple(int(i) for i in rng.permutation(len(shape)))
        a = np.arange(math.prod(shape)).reshape(shape).transpose(order)
        t = xt.from_numpy(a)
        sizes = [d for d in (1, 2, 3, 4, 6, 8, 12, 16, 24) if a.size % d == 0]
        new = (int(rng.choice(sizes)), -1)
        assert np.array_equal(t.reshape(new).numpy(), a.reshape(new))
        try:
            b = a.view()
            b.shape = a.reshape(new).shape
        except AttributeError:
            with pytest.raises((ValueError, RuntimeError)):
                t.view(new)
        else:
            assert t.view(new).data_ptr() == t.data_ptr()


@pytest.mark.on_cpu
def test_properties() -> None:
    t = xt.zeros(2, 3, dtype=xt.float64)
    assert (t.ndim, t.dim(), t.numel(), t.nbytes, t.itemsize, t.element_size()) == (2, 2, 6, 48, 8, 8)
    assert (t.size(), t.size(1), t.size(-2), t.stride(0), tuple(t.stride())) == ((2, 3), 3, 2, 3, (3, 1))
    assert t.shape == (2, 3)
    assert isinstance(t.shape, tuple)
    assert str(t.device) == "cpu"
    assert t.T.shape == (3, 2)
    assert xt.zeros(5, 2, 3).mT.shape == (5, 3, 2)
    assert t.dtype.name == "float64"
    assert t.dtype.is_floating_point
    assert not xt.int64.is_floating_point


def test_conversion_methods() -> None:
    t = xt.tensor([1.5, -2.5, 0.0])
    assert t.int().tolist() == [1, -2, 0]
    assert t.long().dtype is xt.int64
    assert t.bool().tolist() == [True, True, False]
    assert t.double().dtype is xt.float64
    assert t.half().dtype is xt.float16
    assert t.bfloat16().float().tolist() == [1.5, -2.5, 0.0]
    assert t.to(xt.float64).dtype is xt.float64
    assert t.to(xt.zeros(1, dtype=xt.int32)).dtype is xt.int32
    assert t.to("cpu").tolist() == t.tolist()
    assert t.to(dtype=xt.float64, device="cpu").dtype is xt.float64
    assert t.to(xt.float32) is t or t.to(xt.float32).data_ptr() == t.data_ptr()
    if not xt.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA is not available"):
            t.to("cuda")
    with pytest.raises((TypeError, ValueError)):
        t.to("float99")


@pytest.mark.parametrize("name", ["view_as", "expand_as", "type_as"])
def test_what_is_like_no_tensor(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: other must be a Tensor, got tuple"):
        getattr(xt.zeros(2), name)((2,))


def test_scalars() -> None:
    assert xt.tensor(2.5).item() == 2.5
    assert xt.tensor([[7]]).item() == 7
    assert isinstance(xt.tensor(7).item(), int)
    assert xt.tensor(True).item() is True
    assert int(xt.tensor(3.7)) == 3
    assert float(xt.tensor(3)) == 3.0
    assert operator.index(xt.tensor(3)) == 3
    assert [10, 20, 30][xt.tensor(1)] == 20
    assert bool(xt.tensor(0.0)) is False
    assert bool(xt.tensor([5])) is True
    for bad in (
        lambda: xt.zeros(2).item(),
        lambda: bool(xt.zeros(2)),
        lambda: float(xt.zeros(2)),
        lambda: bool(xt.zeros(0)),
        lambda: operator.index(xt.tensor(1.5)),
        lambda: operator.index(xt.zeros(2, dtype=xt.int64)),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            bad()
    with pytest.raises((ValueError, OverflowError)):
        int(xt.tensor(float("nan")))
    with pytest.raises(OverflowError):
        int(xt.tensor(float("inf")))


def test_python_protocols() -> None:
    t = xt.tensor([1.0, 2.0])
    assert hash(t) == hash(t)
    assert len({t, t, xt.tensor([1.0, 2.0])}) == 2
    c = copy.deepcopy(t)
    c[0] = 9.0
    assert t.tolist() == [1, 2]
    leaf = xt.tensor([1.0], requires_grad=True)
    assert copy.deepcopy(leaf).requires_grad
    with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
        pickle.dumps(t)  # DESIGN: no pickle anywhere; it must refuse, not crash
    with pytest.raises((TypeError, AttributeError)):
        t.shape = (1, 2)
