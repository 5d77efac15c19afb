"""`python -m xtrain`: the same as the `xtrain` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
