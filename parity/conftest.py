"""Shared by the parity suite: tensors of both sides on the same device, and PyTorch on one thread per test process."""

from __future__ import annotations

import os

import pytest
import torch

from xtrain import _C

# `make test-gpu` runs the suites with tensors made on the GPU, on both sides: "cuda".
DEVICE = os.environ.get("XTRAIN_TEST_DEVICE", "cpu")
_C.set_default_device(DEVICE)
torch.set_default_device(DEVICE)
torch.set_num_threads(1)  # small ops take several times the processor time with two, which wait for each other


@pytest.fixture(autouse=True)
def clean_state(request):
    """Every test starts from seed 0 on both sides, with the same settings. One that leaves gradient mode or TF32 changed
    fails."""
    if request.node.get_closest_marker("on_cpu"):
        _C.set_default_device("cpu")
        torch.set_default_device("cpu")
    torch.manual_seed(0)
    _C.manual_seed(0)
    yield
    _C.set_default_device(DEVICE)
    torch.set_default_device(DEVICE)
    _C.use_gemm_backend(None)
    _C.use_attention_backend(None)
    grad, tf32 = _C.is_grad_enabled(), _C.tf32()
    _C.set_grad_enabled(True)  # whatever this test did, the next one starts right
    _C.allow_tf32(False)
    assert grad, "the test left gradient mode off"
    assert not tf32, "the test left TF32 on"
