"""CUDA devices as this build sees them. This build has no CUDA library, so there are none, and their memory is 0."""


def is_available():
    """Whether tensors can live on a CUDA device."""
    return device_count() > 0


def device_count():
    """How many CUDA devices tensors can live on."""
    return 0


def synchronize(device=None):
    """Waits for the work queued on a device. RuntimeError without CUDA."""
    raise RuntimeError("synchronize: CUDA must be available, got a build without it")


def memory_allocated(device=None):
    """Bytes of a device that tensors occupy; 0 without CUDA."""
    return 0


def max_memory_allocated(device=None):
    """The most bytes of a device that tensors have occupied at once; 0 without CUDA."""
    return 0


def memory_summary(device=None):
    """One line on the memory of a device, for people."""
    return f"CUDA is not available: {memory_allocated(device)} bytes allocated, {max_memory_allocated(device)} at most"
