"""Which implementation runs a matrix product or an attention: named per device, chosen by `with` or by argument."""

from . import _C, cuda


def gemm_backends(device="cpu"):
    """Names of the matrix product implementations of `device`; the first is what "auto" picks."""
    return _C.gemm_backends(device)


def attention_backends(device="cpu"):
    """Names of the attention implementations of `device`; the first is what "auto" picks."""
    return _C.attention_backends(device)


class _UseBackend:
    """`with use_...(name):` selects a backend by name in this thread; None or "auto" gives the choice back.

    ValueError when no device has a backend of that name.
    """

    def __init__(self, name):
        devices = ["cpu", *(f"cuda:{index}" for index in range(cuda.device_count()))]
        known = [found for device in devices for found in self._names(device)]
        if name not in (None, "auto", *known):
            raise ValueError(f"{type(self).__name__}: name must be one of auto, {', '.join(known)}, got {name!r}")
        self.name = None if name == "auto" else name
        self._previous = []

    def __enter__(self):
        self._previous.append(self._select(self.name))
        return self

    def __exit__(self, *_):
        self._select(self._previous.pop())


class use_gemm_backend(_UseBackend):
    __doc__ = _UseBackend.__doc__
    _names, _select = staticmethod(gemm_backends), staticmethod(_C.use_gemm_backend)


class use_attention_backend(_UseBackend):
    __doc__ = _UseBackend.__doc__
    _names, _select = staticmethod(attention_backends), staticmethod(_C.use_attention_backend)
