"""The Pythons that packages are made and tried for."""

from __future__ import annotations

import shutil
import subprocess

PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]


def on_the_path() -> list[str]:
    """Those of PYTHONS that start: a name on the PATH may be a version manager's, which has no such Python chosen."""
    return [
        name
        for name in PYTHONS
        if shutil.which(name) and not subprocess.run([name, "-c", ""], capture_output=True).returncode
    ]
