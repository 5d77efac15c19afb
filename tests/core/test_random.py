"""Random numbers: Philox known answers, seeds and states, moments of the distributions."""

from __future__ import annotations

import copy
import math
import pickle
import threading

import numpy as np
import pytest
from runs import status_of_child

import xtrain as xt
from xtrain import _C
from xtrain.optable.references import philox_block
from xtrain.tensors import random


def test_philox_known_answers() -> None:
    """Vectors of Random123 (Salmon et al.): counter, key -> words, seen through the stream interface and checked in the reference."""
    for counter, key, want in [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]:
        assert philox_block(np.array([counter], np.uint64), key).tolist() == [list(want)]
    xt.manual_seed(0)
    first = _C.randint(0, 2**32, (2,), _C.int64, None).tolist()
    assert first[0] == 0x6627E8D5 | 0  # (word1 << 32 | word0) % 2^32
    assert first[1] == 0xBC57AC4C
    xt.set_rng_state((0x299F31D0A4093822, 0x0370734413198A2E))  # key and high counter words of the third vector
    words = philox_block(np.array([[0, 0, 0x13198A2E, 0x03707344]], np.uint64), (0xA4093822, 0x299F31D0))[0]
    assert _C.uniform((4,), 0.0, 1.0, _C.float32, None).tolist() == ((words >> np.uint64(8)) * 2.0**-24).tolist()


def test_seeds_and_state() -> None:
    xt.manual_seed(5)
    a, b = xt.randn(10).tolist(), xt.randn(10).tolist()
    assert a != b
    xt.manual_seed(5)
    assert xt.randn(10).tolist() == a
    state = xt.get_rng_state()
    assert xt.randn(10).tolist() == b
    xt.set_rng_state(state)
    assert xt.randn(10).tolist() == b
    xt.manual_seed(6)
    assert xt.randn(10).tolist() != a
    for bad in ("a", 1.5, None):
        with pytest.raises(TypeError):
            xt.manual_seed(bad)
    with pytest.raises((OverflowError, ValueError)):
        xt.manual_seed(2**70)


def test_a_prefix_of_a_fill_does_not_depend_on_its_size() -> None:
    for make in (lambda n: xt.rand(n), lambda n: xt.randn(n), lambda n: xt.randint(0, 1000, (n,))):
        results = []
        for n in (7, 1001, 70000):
            xt.manual_seed(3)
            results.append(make(n).tolist()[:7])
        assert results[0] == results[1] == results[2]


def test_distributions() -> None:
    """Moments within five standard errors."""
    n = 1_000_000
    u, z = xt.rand(n).cpu().numpy().astype(np.float64), xt.randn(n).cpu().numpy().astype(np.float64)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    for power, moment, spread in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean() - moment) < 5 * math.sqrt(spread / n), power
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 5 / math.sqrt(n)
    counts = np.bincount(xt.randint(0, 10, (n,)).cpu().numpy(), minlength=10)
    assert ((counts - n / 10) ** 2 / (n / 10)).sum() < 40  # chi-squared, 9 degrees of freedom
    tail = (np.abs(z) > 3).mean()
    assert abs(tail - 0.0026998) < 5 * math.sqrt(0.0027 / n)


def test_the_last_fill_is_followed_by_the_first() -> None:
    generator = xt.Generator()
    generator.set_state((1, 2**64 - 1))
    assert [generator.key() for _ in range(2)] == [(1, -1), (1, 0)] and generator.get_state() == (1, 1)


def test_a_generator_can_be_copied() -> None:
    own = xt.Generator().manual_seed(5)
    xt.rand(2, generator=own)
    for copied in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert copied.get_state() == own.get_state() == (5, 1)
        xt.rand(2, generator=copied)
        assert copied.get_state() == (5, 2) and own.get_state() == (5, 1), "each counts for itself"


@pytest.mark.on_cpu
def test_a_child_draws_though_another_thread_was_drawing() -> None:
    """The thread that held the lock is not in the child, and never lets go of it."""
    own, held, over = xt.Generator().manual_seed(5), threading.Event(), threading.Event()

    def hold() -> None:
        with random._lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    status = status_of_child(lambda: xt.rand(2, generator=own).shape == (2,))
    over.set()
    thread.join()
    assert status == 0
