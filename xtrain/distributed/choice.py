"""Which plane moves bytes: the variable XTRAIN_PLANE, or what started the ranks."""

from __future__ import annotations

import importlib.util
import os

from ..errors import ConfigError, shown
from .env import Launch

MPI_LAUNCHERS = ("Open MPI", "MPICH")
PLANES = ("host", "mpi", "nccl")


def plane_of(launch: Launch) -> str:
    """host or mpi, for bytes in the memory of hosts. Default, and with nccl: mpi under an MPI launcher where mpi4py is
    installed. ConfigError for another name.
    """
    wanted = os.environ.get("XTRAIN_PLANE", "")
    if wanted not in ("", *PLANES):
        raise ConfigError(f"distributed: XTRAIN_PLANE must be host, mpi or nccl, got {shown(wanted)}")
    if wanted in ("host", "mpi"):
        return wanted
    found = launch.launcher in MPI_LAUNCHERS and importlib.util.find_spec("mpi4py") is not None
    return "mpi" if found else "host"


def joins_gpus() -> bool:
    """Whether tensors of GPUs go from GPU to GPU, by NCCL, rather than through the memory of hosts."""
    return os.environ.get("XTRAIN_PLANE", "") in ("", "nccl")
