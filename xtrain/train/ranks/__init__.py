"""What a run does with other processes: see Team."""

from .team import Team

__all__ = ["Team"]
