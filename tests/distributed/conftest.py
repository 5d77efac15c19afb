"""Packages whose device is that of tests/support/fakes/fake_device.c."""

import pytest
from fake_library import make_device, make_nccl, make_package, on_device
from runs import text_file


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = make_package(tmp_path_factory.mktemp("device"))
    make_device(folder)
    return str(folder)


@pytest.fixture
def data(tmp_path):
    return text_file(tmp_path / "data.txt")


@pytest.fixture(scope="module")
def nccl(package, tmp_path_factory):
    """What makes each rank's device a GPU of its own, with an NCCL."""
    folder = make_nccl(tmp_path_factory.mktemp("nccl"))
    place = tmp_path_factory.mktemp("meeting")

    def variables(**more):
        paths = {"PYTHONPATH": f"{package}:{folder}", "TMPDIR": str(place)}
        return lambda rank: on_device(package, FAKE_DEVICE_UUID=f"GPU-{rank}", **{**paths, **more})(rank)

    return variables
