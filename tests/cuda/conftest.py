"""Where programs of captured steps run: on a GPU, and on a device that computes with the CPU's kernels
(tests/support/fakes/fake_device.c).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_library import make_device, make_package

import xtrain as xt


@pytest.fixture(scope="session")
def fake(tmp_path_factory) -> Path:
    """A folder with the package of that device."""
    folder = make_package(tmp_path_factory.mktemp("device"))
    make_device(folder)
    return folder


@pytest.fixture(params=["fake", "gpu"])
def package(request) -> Path:
    if request.param == "fake":
        return request.getfixturevalue("fake")
    if not xt.cuda.is_available():
        pytest.skip(f"needs a GPU: {xt.cuda.why_unavailable()}")
    return Path(xt.__file__).parent.parent
