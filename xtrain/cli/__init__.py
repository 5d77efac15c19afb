"""The `xtrain` command. Each subcommand imports what it needs, so that help and errors are quick.

Exit status: 0 done; 1 the work failed; 2 wrong usage; 129, 130, 138 or 143 stopped by SIGHUP, Ctrl-C, SIGUSR1 or
SIGTERM (training has saved its state then).
"""

from .dispatch import main

__all__ = ["main"]
