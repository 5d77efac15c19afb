"""CUDA devices as this build sees them. This build has no CUDA library, so there are none."""


def is_available():
    """Whether tensors can live on a CUDA device."""
    return device_count() > 0


def device_count():
    """How many CUDA devices tensors can live on."""
    return 0
