"""Hooks that see ops: those of one thread beside that of the process."""

from __future__ import annotations

import os
import threading
import weakref

import pytest
from runs import python

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


def test_a_hook_goes_with_its_thread(no_leaks):
    """Nothing holds it when its thread has ended, or when another took its place; nor does it take along that of a thread that goes on."""

    class Hook:
        def __call__(self, op, arguments, outputs) -> None:
            names.append(op.__name__)

    def work() -> None:
        first, last = Hook(), Hook()
        left.extend((weakref.ref(first), weakref.ref(last)))
        _C.set_call_hook(first, thread=True)
        _C.set_call_hook(last, thread=True)
        del first
        assert left[0]() is None
        x + 1

    x, own = xt.ones(2), Hook()
    names: list[str] = []
    left: list[weakref.ref[Hook]] = []
    _C.set_call_hook(own, thread=True)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert names == ["add"] and left[1]() is None
    x * 2
    assert names == ["add", "mul"]
    left.append(weakref.ref(own))
    assert _C.set_call_hook(None, thread=True) is own
    del own
    assert left[2]() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork (POSIX)")
def test_hooks_of_threads_in_a_child_and_at_the_end():
    """A child has not the threads of its parent, whose hooks go, and keeps that of its own. Python ends with hooks that are set."""
    code = """
import os, threading, warnings, weakref
warnings.simplefilter("ignore")
import xtrain as xt
from xtrain import _C
seen, stop, ready = [], threading.Event(), threading.Event()
def hook(op, arguments, outputs):
    seen.append(op.__name__)
class Hook:
    def __call__(self, op, arguments, outputs): pass
def work():
    global of_thread
    own = Hook()
    of_thread = weakref.ref(own)
    _C.set_call_hook(own, thread=True)
    del own
    ready.set()
    stop.wait()
_C.set_call_hook(hook, thread=True)
threading.Thread(target=work, daemon=True).start()
ready.wait()
child = os.fork()
assert (of_thread() is None) == (child == 0)
x = xt.ones(2)
assert seen == ["full"], seen
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    done = python("-c", code, timeout=60)
    assert done.returncode == 0, done.stderr
