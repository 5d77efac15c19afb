"""What the machine has, as far as Python can ask it."""

from __future__ import annotations

import os
import re
from io import FileIO

# Limits of a container (a control group of version 2 or 1), as it sees its own.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Bytes that this process may have: the machine's, or a container's where that has fewer."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _LIMITS:
        try:  # each tensor of a file asks: not by way of pathlib
            with FileIO(path) as file:
                limit = file.read().strip()
        except OSError:
            continue
        if re.fullmatch(rb"[0-9]{1,20}", limit):  # "max" is none
            memory = min(memory, int(limit))
    return memory
