"""Which plane moves bytes: the variable XTRAIN_PLANE, or what started the ranks."""

from __future__ import annotations

import importlib.util
import os

from ..errors import ConfigError, shown
from .env import Launch

MPI_LAUNCHERS = ("Open MPI", "MPICH")


def plane_of(launch: Launch) -> str:
    """host or mpi. Default: mpi under an MPI launcher where mpi4py is installed. ConfigError for another name."""
    wanted = os.environ.get("XTRAIN_PLANE", "")
    if wanted not in ("", "host", "mpi"):
        raise ConfigError(f"distributed: XTRAIN_PLANE must be host or mpi, got {shown(wanted)}")
    if wanted:
        return wanted
    found = launch.launcher in MPI_LAUNCHERS and importlib.util.find_spec("mpi4py") is not None
    return "mpi" if found else "host"
