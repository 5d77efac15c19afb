"""Hooks that see ops: those of one thread beside that of the process."""

from __future__ import annotations

import threading

import pytest

import xtrain as xt
from xtrain import _C

pytestmark = pytest.mark.on_cpu


def test_a_hook_of_one_thread(no_leaks):
    """It sees no ops of others, and those of the process are seen, too, whatever is set or removed meanwhile."""
    seen: list[tuple[str, str]] = []

    def hook(who):
        return lambda op, arguments, outputs: seen.append((who, op.__name__, outputs[0] + 1)[:2])

    def elsewhere(act):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    x = xt.ones(2)
    own, first, second = hook("own"), hook("first"), hook("second")
    assert _C.set_call_hook(first) is None and _C.set_call_hook(own, thread=True) is None
    x * 2
    assert seen == [("own", "mul"), ("first", "mul")], "and not what hooks call"
    elsewhere(lambda: _C.set_call_hook(second))
    elsewhere(lambda: x - 1)
    assert seen[2:] == [("second", "sub")]
    other = hook("other")
    assert _C.set_call_hook(other, thread=True) is own and _C.set_call_hook(own, thread=True) is other
    assert _C.set_call_hook(None, thread=True) is own
    x * 2
    assert seen[3:] == [("second", "mul")]
    elsewhere(lambda: _C.set_call_hook(hook("gone"), thread=True) or x - 1)
    assert seen[4:] == [("gone", "sub"), ("second", "sub")]
    assert _C.set_call_hook(None) is second and _C.set_call_hook(None, thread=True) is None
    x * 2
    assert len(seen) == 6


def test_a_hook_of_one_thread_may_raise_or_remove_itself(no_leaks):
    seen: list[str] = []

    def once(op, arguments, outputs):
        _C.set_call_hook(None, thread=True)
        raise KeyError("from the hook")

    _C.set_call_hook(lambda op, arguments, outputs: seen.append(op.__name__))
    _C.set_call_hook(once, thread=True)
    try:
        with pytest.raises(KeyError, match="from the hook"):
            xt.ones(3)
        assert seen == []
        x = xt.ones(3)
    finally:
        _C.set_call_hook(None)
    assert x.tolist() == [1, 1, 1] and seen == ["full"]
