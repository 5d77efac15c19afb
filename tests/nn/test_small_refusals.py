"""Arguments that look alike: what is taken, and what is refused in a sentence."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from places import ROOT

import xtrain as xt
from xtrain import _C
from xtrain.generation import generate_texts
from xtrain.models import Llama, LlamaConfig
from xtrain.tokenizers import ByteTokenizer

pytestmark = pytest.mark.on_cpu


@pytest.fixture(scope="module")
def model() -> Llama:
    xt.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return Llama(LlamaConfig(**sizes, num_key_value_heads=2))


def test_repeat_takes_all_kinds_of_sizes() -> None:
    x = xt.arange(3)
    want = x.repeat(1, 2).tolist()
    for sizes in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.int32)):
        assert x.repeat(sizes).tolist() == want
    assert x.repeat(np.int64(2)).tolist() == x.repeat(np.array(2)).tolist() == [0, 1, 2] * 2
    with pytest.raises(TypeError, match="repeat: each of sizes must be an int, got float"):
        x.repeat(np.array([1.0]))


def test_generate_takes_numpy_integers(model) -> None:
    want = model.generate([1, 2], 4, top_k=3, seed=1).tolist()
    assert model.generate([1, 2], np.int64(4), top_k=np.int32(3), seed=1).tolist() == want
    assert model.generate([1, 2], np.uint8(4), top_k=xt.tensor(3), seed=1).tolist() == want
    for bad in (4.0, np.float32(4), "4", None):
        with pytest.raises(ValueError, match="generate: max_new_tokens must be an integer"):
            model.generate([1, 2], bad)
    with pytest.raises(ValueError, match="generate: top_k must be an integer >= 1 or None, got 2.0"):
        model.generate([1, 2], 3, top_k=2.0)


def test_prompts_are_lists_of_ids(model) -> None:
    assert len(generate_texts(model, ByteTokenizer(), [[97, 98], np.array([[99]])], 2)) == 2
    with pytest.raises(ValueError, match=r"ids must be one list of token ids, got shape \(2, 2\) in prompt 1"):
        generate_texts(model, ByteTokenizer(), [[97], [[97, 98], [99, 100]]], 2)


def test_the_variance_of_a_scalar() -> None:
    x = xt.tensor(3.0)
    for dim in (None, 0, -1):
        assert np.isnan(x.var(dim).item()) and x.var(dim, unbiased=False).item() == 0.0
        assert np.isnan(x.std(dim).item())
    with pytest.raises(IndexError, match=r"dim must be in \[-1, 0\], got 1"):
        x.var(1)


def test_errors_of_rows_have_the_name_of_the_call() -> None:
    x = xt.zeros(3, 2)
    with pytest.raises(IndexError, match=r"^index_select: index must be in \[-3, 3\), got 3 at position 1$"):
        x.index_select(0, xt.tensor([0, 3]))
    with pytest.raises(TypeError, match=r"^index_select: indices must be int64 or int32, got float32$"):
        x.index_select(0, xt.zeros(2))
    with pytest.raises(IndexError, match=r"^index_add: index must be in \[-3, 3\), got 5 at position 0$"):
        x.index_add(0, xt.tensor([5]), xt.ones(1, 2))
    with pytest.raises(ValueError, match=r"^index_add: values must have"):
        x.index_add(0, xt.tensor([1]), xt.ones(1, 5))


def test_what_is_repeated_by_a_stride_is_read_once() -> None:
    wide = xt.tensor([[1.0], [float("nan")], [-3.0], [float("inf")]]).expand(4, 10**12)
    begun = time.process_time()
    text = repr(wide)
    assert time.process_time() - begun < 60  # an element at a time takes an hour
    assert "min=-3, max=1, mean=-1, nan=1000000000000, inf=1000000000000" in text
    assert _C.stats(wide) == (-3.0, 1.0, -1.0, 10**12, 10**12)
    dense = xt.tensor([[2.0, 5.0]]).expand(900, 2)
    assert _C.stats(dense) == _C.stats(dense.contiguous())


def test_a_tool_without_a_python_says_so(tmp_path) -> None:
    tool = str(ROOT / "tools/try_package.py")
    for words, said in (
        (["x.whl", "--python", "no-such-python"], "no-such-python cannot be run: No such file or directory"),
        (["x.whl"], "no Python among python3.10"),
    ):
        done = subprocess.run(
            [sys.executable, tool, *words], capture_output=True, text=True, env={"PATH": str(tmp_path)}
        )
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
