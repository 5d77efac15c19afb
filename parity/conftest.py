"""Shared by the parity suite: the op table of tests/ on the path, and PyTorch on one thread per test process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


@pytest.fixture(autouse=True)
def clean_state():
    """Every test starts from seed 0 on both sides and leaves backends and gradient mode as they were."""
    from xtrain import _C

    torch.manual_seed(0)
    _C.manual_seed(0)
    yield
    _C.use_gemm_backend(None)
    _C.use_attention_backend(None)
    assert _C.is_grad_enabled()
