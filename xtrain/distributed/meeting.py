"""Where ranks of an MPI job on several hosts meet: rank 0 tells them through mpi4py."""

from __future__ import annotations

import dataclasses
import json
import secrets
import socket

from ..errors import ConfigError
from .env import AGENT_PORTS, Launch

_LONGEST = 1024  # bytes of the message


def find_others(launch: Launch) -> Launch:
    """`launch` with an address. One that has none is of an MPI job on several hosts. ConfigError without mpi4py."""
    if launch.file or launch.host:
        return launch
    from . import mpi

    try:
        mpi.load(launch)
    except ConfigError as error:
        raise ConfigError(
            f"distributed: {launch.launcher}: several hosts need mpi4py, or MASTER_ADDR set to the host of rank 0, got "
            f"{launch.local_world_size} of {launch.world_size} ranks on one host; {error}"
        ) from None
    mpi.start(launch)
    message = bytearray(_LONGEST)
    if launch.rank == 0:
        first = 20000 + secrets.randbelow(40000)
        text = json.dumps({"host": socket.gethostname(), "port": first, "token": secrets.token_hex(16)}).encode()
        message[: len(text)] = text
    mpi.MPI.COMM_WORLD.Bcast(message, root=0)
    values = json.loads(bytes(message).rstrip(b"\0"))
    ports = tuple(range(values["port"], values["port"] + AGENT_PORTS))
    return dataclasses.replace(launch, host=values["host"], ports=ports, token=launch.token or values["token"])
