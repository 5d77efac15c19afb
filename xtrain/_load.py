"""Loads the compiled core, and with it xtrain's own copy of OpenBLAS.

OpenBLAS chooses its kernels when it is loaded and lets OPENBLAS_* variables decide. Those are meant for the copies that
users call through NumPy or SciPy; ours is private, always runs in the calling thread, and takes the kernels of the CPU
it finds. XTRAIN_BLAS_CORE (an OpenBLAS core name such as Haswell or SkylakeX) overrides that.
"""

import atexit as _atexit
import os as _os
import sys as _sys

import numpy as _numpy  # noqa: F401  (first: NumPy's own copy of OpenBLAS must see the variables that are hidden below)


def _load() -> None:
    """Loads xtrain._C while the OPENBLAS_* variables of the environment are ours."""
    hidden = {name: _os.environ.pop(name) for name in list(_os.environ) if name.startswith("OPENBLAS_")}
    ours = {"OPENBLAS_NUM_THREADS": "1"}  # else it starts a thread for each processor, which spins and is never used
    if core := _os.environ.get("XTRAIN_BLAS_CORE"):
        ours["OPENBLAS_CORETYPE"] = core
    _os.environ.update(ours)
    try:
        from . import _C  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"xtrain: the compiled core xtrain._C cannot be loaded ({error}); build it with `make build`"
        ) from error
    finally:
        for name in ours:
            del _os.environ[name]
        _os.environ.update(hidden)


_load()
from . import _C  # noqa: E402  (here, because no annotation names the type of a module)

_atexit.register(_C.end_threads)
# Where NVIDIA's wheels lie, should a CUDA device ever be asked for. What is not a str, imports ignore too.
_C.set_package_folders(
    [path for path in _sys.path if isinstance(path, str) and path.endswith(("site-packages", "dist-packages"))]
)
