"""Rules of the binding: what is taken for a number, whose memory is whose, what stays as it was after an error."""

from __future__ import annotations

import copy
import ctypes
import gc
import hashlib
import threading
import weakref

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

pytestmark = pytest.mark.on_cpu


# ---- arguments


def test_bools_are_no_numbers_of_options() -> None:
    for call in (
        lambda: xt.zeros((2, 2)).sum(True),
        lambda: _C.set_num_threads(True),
        lambda: F.rms_norm(xt.ones((2, 2)), (2,), None, True),
    ):
        with pytest.raises(TypeError, match="got bool"):
            call()


def test_scalars_of_numpy_are_what_they_are() -> None:
    """A bool is no integer, which would change the dtype of a mask, and a complex number is refused."""
    mask = xt.tensor([True, False])
    for true in (True, np.True_, np.array(True)):
        assert _C.add(mask, true).dtype is xt.bool
    for bad in (1j, np.complex64(1), np.complex128(1)):
        with pytest.raises(TypeError, match="argument 'value' must be a number, got .*complex"):
            _C.full((2,), bad)
        with pytest.raises(TypeError, match="argument 'eps' must be a float, got .*complex"):
            _C.rms_norm(xt.ones(1, 2), None, bad)


def test_a_hook_sees_arguments_that_make_the_same_call() -> None:
    seen: list = []
    x, mask = xt.tensor([1, 2]), xt.tensor([True, False])
    before = _C.set_call_hook(lambda op, arguments, outputs: seen.append((op, arguments, outputs)))
    try:
        mask.masked_fill(mask, True), x + 2, x + 0.5, x.sum(0), x.reshape(2, 1), x.squeeze(), x.to(xt.float64)
    finally:
        _C.set_call_hook(before)
    assert len(seen) == 7
    for op, arguments, (y,) in seen:
        again = op(**arguments)
        assert again.dtype is y.dtype and again.tolist() == y.tolist()


def test_integers_beyond_64_bits() -> None:
    for value in (2**63, -(2**63) - 1, 10**30):
        with pytest.raises(ValueError, match=r"argument 'dim' must fit in 64 bits, got a larger integer"):
            _C.select(xt.zeros((2, 2)), value, 0)
    with pytest.raises(ValueError, match="must fit in 64 bits"):
        _C.manual_seed(2**64)
    _C.manual_seed(2**64 - 1)
    assert _C.get_rng_state() == (2**64 - 1, 0)


def test_integers_beyond_a_float() -> None:
    for value in (10**400, -(10**400)):
        with pytest.raises(ValueError, match=r"^rope: argument 'theta' must fit in a float, got a larger integer$"):
            F.rope(xt.ones((2, 2, 2)), theta=value)


def test_text_with_nul() -> None:
    with pytest.raises(ValueError, match="gelu: argument 'approximate' must not contain NUL characters"):
        _C.gelu(xt.ones((2,)), "tanh\0none")


def test_an_argument_is_given_once() -> None:
    with pytest.raises(TypeError, match="sum: argument 'dim' was given twice"):
        _C.sum(xt.ones((2,)), 0, dim=0)
    for target in (xt.float64, "float64", xt.ones((1,))):
        with pytest.raises(TypeError, match="to: dtype was given twice"):
            xt.ones((2,)).to(target, dtype=xt.float32)


def test_a_list_may_change_during_a_call() -> None:
    """The call has its own references: another thread clears the list while the kernel runs without the GIL."""
    done = 0
    while done < 5:
        parts = [xt.full((400000,), float(i)) for i in range(12)]
        go = threading.Event()
        thread = threading.Thread(
            target=lambda parts=parts, go=go: (go.wait(), parts.clear(), [xt.full((400000,), 99.0) for _ in range(12)])
        )
        thread.start()
        go.set()
        try:
            out = _C.cat(parts, 0)
        except ValueError:  # it was cleared before the call
            continue
        finally:
            thread.join()
        assert out.numpy()[::400000].tolist() == [float(i) for i in range(12)] and out[-1].item() == 11.0
        done += 1


def test_items_are_exact() -> None:
    """Every float16, each as Python's number."""
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    got = np.array(xt.from_numpy(every.copy()).tolist())
    assert np.array_equal(got, every.astype(np.float64), equal_nan=True) and np.signbit(got[0x8000])


# ---- indexing


def test_a_bool_is_no_index() -> None:
    """NumPy would take it for a mask: it is refused, in any form and place."""
    x = xt.zeros((2, 3))
    for true in (True, np.True_, np.array(True), xt.tensor(True)):
        for key in (true, (0, true)):
            with pytest.raises(TypeError, match="a tensor is indexed with ints, slices, None and"):
                x[key]
        with pytest.raises(TypeError, match="a tensor is indexed with"):
            x[true] = 1.0


def test_an_ellipsis_behind_none() -> None:
    x = np.arange(24).reshape(2, 3, 4)
    for key in ((None, ..., 1), (None, None, ..., 0, 2), (1, None, ...), (..., None, 1)):
        assert np.array_equal(xt.tensor(x)[key].numpy(), x[key]), key


def test_recording_is_as_before_a_failed_assignment() -> None:
    x = xt.zeros((2, 3))
    for key, value in ((5, 1.0), (0, xt.zeros((7,)))):
        with pytest.raises((IndexError, ValueError)):
            x[key] = value
        assert xt.is_grad_enabled()


def test_assignments_leak_nothing() -> None:
    x = xt.zeros((20, 30))
    x[3] = 1.0
    gc.collect()
    before = _C.memory_stats("cpu")["live_tensors"]
    for i in range(20):
        x[i, 2:5] = xt.ones((3,))
    assert _C.memory_stats("cpu")["live_tensors"] == before


# ---- whose memory


def test_a_gradient_that_is_set_keeps_no_graph() -> None:
    """It is an alias: the history of what was set does not stay in memory, and .grad requires none."""
    x, w = xt.ones((3,)).requires_grad_(), xt.ones((3,)).requires_grad_()
    w.grad = x * 2.0
    assert not w.grad.requires_grad and w.grad.is_leaf


def test_a_tensor_is_not_its_own_gradient() -> None:
    x = xt.ones((2,)).requires_grad_()
    with pytest.raises(RuntimeError, match="grad: a tensor cannot be its own gradient"):
        x.grad = x
    assert x.grad is None


def test_misaligned_arrays_are_copied_or_refused() -> None:
    array = np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float32)
    array[...] = [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="from_numpy: array must be aligned"):
        xt.from_numpy(array)
    assert xt.tensor(array).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_tensor_of_a_tensor_is_a_copy() -> None:
    for x in (xt.ones((3,)), xt.ones((3, 2)).T, xt.ones((3,), dtype=xt.int64)):
        y = xt.tensor(x)
        y.add_(1)
        assert (x.numpy() == 1).all() and (y.numpy() == 2).all()


def test_a_deep_copy_has_memory_of_its_own() -> None:
    x = xt.ones((3,))
    copy.deepcopy(x).add_(1)
    assert x.tolist() == [1.0] * 3 and copy.copy(x).data_ptr() == x.data_ptr()


def test_expanded_memory_is_read_only() -> None:
    array = xt.ones((1, 3)).expand((4, 3)).numpy()
    assert not array.flags.writeable and np.asarray(memoryview(xt.ones((1,)).expand((4,)))).flags.writeable is False
    assert xt.ones((4, 3)).numpy().flags.writeable


def test_an_array_keeps_its_tensor() -> None:
    x = xt.full((3000,), 7.0)
    array = x.numpy()
    gone = weakref.ref(x)
    del x
    gc.collect()
    junk = [xt.full((3000,), 1.0) for _ in range(4)]
    assert gone() is not None and (array == 7.0).all() and junk
    del array
    assert gone() is None


def test_a_tensor_keeps_its_array() -> None:
    class Array(np.ndarray):
        pass

    array = np.full(3000, 7.0, np.float32).view(Array)
    gone, x = weakref.ref(array), xt.from_numpy(array)
    del array
    gc.collect()
    junk = [np.full(3000, 1.0, np.float32) for _ in range(4)]
    assert gone() is not None and (x.numpy() == 7.0).all() and junk
    del x
    gc.collect()
    assert gone() is None


def test_buffers_of_strided_memory() -> None:
    """A reader that knows strides gets them; one that knows none gets dense memory only."""
    x = xt.tensor([[1, 2], [3, 4]], dtype=xt.uint8)
    assert (
        bytes(memoryview(x.T)) == bytes([1, 3, 2, 4])
        and hashlib.sha256(x).digest() == hashlib.sha256(bytes([1, 2, 3, 4])).digest()
    )
    for strided in (x.T, x[:, 0]):
        with pytest.raises(BufferError, match="buffer: tensor has strides; call contiguous"):
            hashlib.sha256(strided)


def test_borrowed_memory_is_given_back_once() -> None:
    class Array(np.ndarray):
        pass

    array = np.ones(10, np.float32).view(Array)
    gone = weakref.ref(array)
    x = xt.from_dlpack(array)
    y = x[2:]
    del array, x
    gc.collect()
    assert gone() is not None and y.tolist() == [1.0] * 8
    del y
    gc.collect()
    assert gone() is None
    tensor = xt.ones((10,))
    before = _C.memory_stats("cpu")["live_tensors"]
    borrowed = xt.from_dlpack(tensor)
    del borrowed
    tensor.__dlpack__(max_version=(1, 1))  # dropped unconsumed
    assert _C.memory_stats("cpu")["live_tensors"] == before


def test_read_only_memory_is_refused() -> None:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    with pytest.raises(BufferError, match="data must be writable; pass a copy|readonly|read-only"):
        xt.from_dlpack(array)

    class Lender:  # of a capsule that says so itself
        def __dlpack__(self, **options):
            return array.__dlpack__(max_version=(1, 0))

        def __dlpack_device__(self):
            return (1, 0)

    with pytest.raises(BufferError, match="from_dlpack: data must be writable; pass a copy"):
        xt.from_dlpack(Lender())


def test_a_tensor_that_requires_a_gradient_is_not_lent() -> None:
    for x in (xt.ones((2,)).requires_grad_(), xt.ones((2,)).requires_grad_() * 2.0):
        with pytest.raises(BufferError, match=r"tensor must not require a gradient; call detach\(\) first"):
            np.from_dlpack(x)


def test_a_copy_through_dlpack_is_one() -> None:
    x = xt.ones((3,))
    copied = xt.from_dlpack(x.__dlpack__(copy=True))
    shared = xt.from_dlpack(x.__dlpack__(copy=False))
    x.add_(1)
    assert copied.tolist() == [1.0] * 3 and shared.tolist() == [2.0] * 3


def test_bytes_have_the_size_of_their_shape() -> None:
    for size in (7, 9, 0):
        with pytest.raises(ValueError, match=rf"from_bytes: buffer must hold 8 bytes for float32 \(2,\), got {size}"):
            _C.from_bytes(bytes(size), _C.float32, (2,))
    with pytest.raises(ValueError, match="to_bytes: input must be contiguous"):
        _C.to_bytes(xt.ones((2, 3)).T)


def test_a_deep_copy_has_a_gradient_of_its_own() -> None:
    x = xt.ones((2,)).requires_grad_()
    x.grad = xt.full((2,), 3.0)
    twin = copy.deepcopy(x)
    x.grad.add_(1)
    assert twin.requires_grad and twin.grad.tolist() == [3.0, 3.0]


def test_a_deep_copy_of_a_cycle_is_a_cycle() -> None:
    class Odd(xt.Tensor):
        pass

    odd = _C.make_subclass(Odd, xt.ones(2))
    odd.parts = [odd]
    twin = copy.deepcopy(odd)
    assert twin.parts[0] is twin is not odd


def test_a_collected_tensor_keeps_memory_that_is_still_read() -> None:
    """A cycle of garbage through a subclass, while a memoryview of it is alive."""

    class Odd(xt.Tensor):
        pass

    odd = _C.make_subclass(Odd, xt.full((3000,), 7.0))
    view = memoryview(odd)
    odd.self = odd
    holder = [odd]
    holder.append(holder)
    del odd, holder
    gc.collect()
    junk = [xt.full((3000,), 1.0) for _ in range(4)]
    assert (np.asarray(view) == 7.0).all() and junk


def lent(array: np.ndarray, change=lambda at: None) -> object:
    """A lender of a versioned capsule of NumPy's in which `change(address)` has written; its data at 32, its offset at 72."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = array.__dlpack__(max_version=(1, 0))
    change(pointer(capsule, b"dltensor_versioned"))

    class Lender:
        def __dlpack__(self, **options):
            return capsule

        def __dlpack_device__(self):
            return (1, 0)

    return Lender()


def test_a_capsule_says_where_its_data_is() -> None:
    def far(at: int) -> None:  # the data begins 96 bytes behind what is named
        ctypes.c_uint64.from_address(at + 32).value -= 96
        ctypes.c_uint64.from_address(at + 72).value = 96

    def odd(at: int) -> None:
        ctypes.c_uint64.from_address(at + 32).value += 2

    def newer(at: int) -> None:
        ctypes.c_uint32.from_address(at).value = 2

    array = np.arange(4, dtype=np.float32)
    assert xt.from_dlpack(lent(array, far)).tolist() == array.tolist()
    for change, match in ((odd, "data must be aligned to 4 bytes"), (newer, "DLPack major version must be 1, got 2")):
        with pytest.raises(BufferError, match="from_dlpack: " + match):
            xt.from_dlpack(lent(array, change))


def test_a_capsule_says_that_it_is_a_copy() -> None:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    x = xt.ones(2)
    for copied in (False, True):
        capsule = x.__dlpack__(max_version=(1, 1), copy=copied)
        flags = ctypes.c_uint64.from_address(pointer(capsule, b"dltensor_versioned") + 24).value
        assert flags == (2 if copied else 0)
    with pytest.raises(BufferError, match="argument 'stream' must be None for a tensor on the CPU, got 1"):
        x.__dlpack__(stream=1)


def test_what_is_a_copy_and_what_is_not() -> None:
    x = xt.arange(3).float()
    assert x.contiguous() is x and x.to(xt.float32) is x and _C.cast(x, xt.float32) is x
    for apart in (x.__array__(copy=True), np.array(x, copy=True)):
        apart[:] = 7
    x[[1]].fill_(7)
    assert x.tolist() == [0, 1, 2]
    for dtype in (xt.float32, xt.int64, xt.bool):
        y = x.to(dtype)
        assert y.to(dtype, copy=True).data_ptr() != y.data_ptr() == y.to(dtype).data_ptr()
    kept = [xt.empty(n) for n in range(1, 4000, 100)]
    assert all(y.data_ptr() % 64 == 0 for y in kept)
    x.__array__(copy=False)[0] = 5
    assert x.tolist() == [5, 1, 2]
    for options in ({}, {"dtype": xt.float32}):
        with pytest.raises(TypeError, match="tensor: array must be .*, got complex64"):
            xt.tensor(np.ones(2, np.complex64), **options)


def test_a_thousand_values_are_shown() -> None:
    assert len(repr(xt.zeros(1000))) > 1000 > len(repr(xt.zeros(1001)))


# ---- names, entries, devices, dtypes


class _Foreign:
    """A tensor of another library, by what it can do."""

    def __dlpack__(self, **options):
        raise RuntimeError("never asked for")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: _C.permute(x, [0, None]), TypeError, r"permute: argument 'dims' must be an int or a tuple of ints, got None as entry 1"),
        (lambda x: _C.cat([x, 3], 0), TypeError, r"cat: argument 'tensors' must be a list or tuple of Tensors, got int as entry 1"),
        (lambda x: x.sum(xt.tensor(True)), TypeError, r"sum: argument 'dim' must be .*, got xtrain.Tensor"),
        (lambda x: _C.gelu(x, "\ud800"), ValueError, r"gelu: argument 'approximate' must be text without lone surrogates, got '\\ud800'"),
        (lambda x: _C.full((2,), xt.ones(1)), TypeError, r"full: argument 'value' must be a number, got xtrain.Tensor"),
        (lambda x: _C.rms_norm(x, None, np.ones(1)), TypeError, r"rms_norm: argument 'eps' must be a float, got numpy.ndarray"),
        (lambda x: _C.full((2,), np.ones(3)), TypeError, r"full: argument 'value' must be a number, got numpy.ndarray"),
        (lambda x: _C.full((2,), _Foreign()), TypeError, rf"full: argument 'value' must be a number, got {__name__}._Foreign"),
        (lambda x: _C.exp(_Foreign()), TypeError, rf"exp: argument 'input' must be a Tensor, got {__name__}._Foreign \(use xt.from_dlpack\)"),
        (lambda x: _C.exp(np.ones(3)), TypeError, r"exp: argument 'input' must be a Tensor, got numpy.ndarray \(use xt.from_numpy\)"),
        (lambda x: xt.dtype(name="float32"), TypeError, r"dtype: takes one positional argument, a dtype or its name"),
        (lambda x: xt.device("cuda", -1), ValueError, r"device: argument 'index' must be in \[0, 255\], got -1"),
        (lambda x: xt.device("cuda", 256), ValueError, r"device: argument 'index' must be in \[0, 255\], got 256"),
        (lambda x: xt.device("meta", 2), ValueError, r"device: argument 'index' must be in \[0, 1\], got 2"),
        (lambda x: xt.device("cuda", "1"), TypeError, r"device: argument 'index' must be an int or None, got str"),
        (lambda x: xt.device("cpu:1"), ValueError, r"device: argument 'type' must be 'cpu', 'cuda', .*, got 'cpu:1'"),
        (lambda x: xt.device("cuda:0000"), ValueError, r"device: argument 'type' must be 'cpu', 'cuda', .*, got 'cuda:0000'"),
        (lambda x: xt.device("cuda:256"), ValueError, r"device: argument 'type' must be 'cpu', 'cuda', .*, got 'cuda:256'"),
        (lambda x: _C.cuda_info("meta"), ValueError, r"argument 'device' must be a CUDA device, got meta:0"),
        (lambda x: _C.cuda_stream("cpu"), ValueError, r"argument 'device' must be a CUDA device, got cpu"),
        (lambda x: x.cuda("meta"), ValueError, r"cuda: argument 'device' must be a CUDA device, got meta:0"),
        (lambda x: x.to("cpu", device="cpu"), TypeError, r"to: device was given twice"),
        (lambda x: x.to("float32", dtype="float32"), TypeError, r"to: dtype was given twice"),
        (lambda x: x[:: -(2**70)], ValueError, r"slice: step must be at least 1 \(reversing is not supported\), got -\d+"),
    ],
)  # fmt: skip
def test_a_sentence_names_the_argument_and_what_was_given(call, error, words: str) -> None:
    with pytest.raises(error, match=f"^{words}$"):
        call(xt.ones(2, 3))


def test_a_name_that_was_made_at_run_time_is_a_name() -> None:
    x = xt.tensor([[1.0, 2.0]])
    assert _C.softmax(x, **{"".join(("d", "im")): 0}).tolist() == [[1, 1]]


def test_dims_apart_and_in_one_tuple() -> None:
    """As many as a tensor can have."""
    for shape in ((3,), (3, 1), (1,) * 7 + (3,)):
        assert xt.ones(3).reshape(*shape).shape == xt.ones(3).reshape(shape).shape == shape


def test_the_numbers_of_devices() -> None:
    for text, name, index in (("cpu", "cpu", None), ("cpu:0", "cpu", None), ("cuda", "cuda", 0), ("cuda:255", "cuda", 255), ("meta", "meta", 0), ("meta:1", "meta", 1)):  # fmt: skip
        device = xt.device(text)
        assert (device.type, device.index) == (name, index)
        assert device == xt.device(name, index) and (device != xt.device(name, index)) is False
        assert copy.deepcopy(device) == device
    assert xt.device("cuda", 255) == xt.device("cuda:255") != xt.device("cuda:254")


def test_a_hook_sees_arguments_as_they_were_given() -> None:
    seen: list = []
    before = _C.set_call_hook(lambda op, arguments, outputs: seen.append(arguments))
    try:
        x = _C.full((3, 2), 1.0, "float32", "meta")
        _C.split(x, (3,), 0), _C.split(x, 3, 0), _C.rms_norm(xt.ones(1, 2), None, 0.5)
    finally:
        _C.set_call_hook(before)
    made, parts, pieces, *_, norm = seen
    assert made["device"] == xt.device("meta") and norm["eps"] == 0.5
    sizes = [
        [value for value in arguments.values() if not isinstance(value, xt.Tensor)] for arguments in (parts, pieces)
    ]
    assert sizes == [[(3,), 0], [3, 0]]


def test_what_an_op_says_of_itself() -> None:
    for op, differentiable, method in ((_C.exp, True, True), (_C.argmax, False, True), (_C.full, False, False), (_C.cat, True, False), (_C.set_num_threads, False, False)):  # fmt: skip
        assert (op.differentiable, op.is_method) == (differentiable, method), op
