"""Where the time of a step goes: `xt.profile`, and spans of one's own. Part of the ground floor; how-to/profile.md."""

from .kernels import Kernel
from .recorder import Event, profile, span

__all__ = ["Event", "Kernel", "profile", "span"]
