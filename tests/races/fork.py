"""Forks beside backwards of other threads: in the child no lock is held and nobody adds to a .grad, whatever its parent's threads did.

The child reads values that the parent's other threads were writing, and only asks that its own backward comes to its end.

The first product of a process asks OpenBLAS whether a cut changes bits (csrc/cpu/gemm/blas.c), 15 ms of a CPU where a turn takes 0.1: the
backwards wait for it, and a child that was forked before its end does it again. Beside 32 other programs on two cores that takes 2 s, in
which loops and hooks go on, and backwards and forks make the one turn that they must.

NO TSAN: children of a process with several threads hang in the run-time library of gcc 12's ThreadSanitizer.
"""

import os
import threading
import traceback
import warnings

from race import race

import xtrain as xt
import xtrain.functional as F  # before the forks: a child waits for ever for a module that another thread was importing

warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
w = xt.ones(16, 16).requires_grad_(True)
x = xt.ones(8, 16)
long = xt.ones(100_000)


def walk() -> None:
    F.linear(x, w).sum().backward()


def loop() -> None:
    assert float((long * 2.0).sum()) == 200_000.0


def hooks() -> None:
    w.register_hook(lambda g: None).remove()


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            watch = threading.Timer(60, os._exit, (4,))
            watch.daemon = True
            watch.start()
            walk()
            hooks()
            loop()
            w.grad = None
            walk()
            assert w.grad.tolist() == [[8.0] * 16] * 16
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the child ended with status {status}"


race(walk, walk, loop, hooks, fork)
