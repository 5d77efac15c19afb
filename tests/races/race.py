"""What the race scripts share. A script takes the seconds it may run (default 5), and its exit status is the verdict.

One runs by itself with `python`, a script and the seconds; tests/core/test_races.py runs each for a moment, `make tsan` under ThreadSanitizer.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0


def race(*workers: Callable[[], object], seconds: float = SECONDS, least: int = 1) -> list[int]:
    """Calls each worker again and again in a thread of its own until the time is over; returns how often. Ends the process with
    status 1 where a worker raised, did not get `least` rounds or did not come back."""
    counts, failures, end = [0] * len(workers), [], time.monotonic() + seconds

    def loop(i: int) -> None:
        try:
            while not failures and (time.monotonic() < end or counts[i] < least):
                workers[i]()
                counts[i] += 1
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=loop, args=(i,), daemon=True) for i in range(len(workers))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()) + 300)
    sys.setswitchinterval(interval)
    if failures or any(thread.is_alive() for thread in threads):
        print("failed" if failures else "a thread hangs", counts, failures, file=sys.stderr, flush=True)
        if not failures:
            faulthandler.dump_traceback()
        sys.stderr.flush()
        import os

        os._exit(1)
    print(*counts)
    return counts
