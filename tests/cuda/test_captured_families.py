"""Captured steps of the families beside Qwen3 and GPT-2 (test_graph.py), on the fake device and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from runs import HANGS

SUPPORT = ROOT / "tests/support"
# What only this family has, and what its file may ask for.
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {"sliding_window": 5},
    "qwen2": {"tie_word_embeddings": True},
}
TRAIN = """import json
from pathlib import Path
from xtrain.models.registry import architecture
keys = {**SMALL, "vocab_size": 256, "model_type": FAMILY, **MORE}
Path("model").mkdir()
Path("model/config.json").write_text(json.dumps(architecture(FAMILY).config(**keys).to_dict()))
sizes = dict.fromkeys(name.replace(".", "__") for name in TINY if name.startswith("model."))
train_equal(".", **sizes, model__preset="model", precision="bfloat16", grad_accum=2, eval_every=8, steps=12)"""


def run(folder: Path, package: Path, program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (package, SUPPORT, ROOT)))}
    code = f"from graph_programs import *\nfrom graph_training import *\n{program}"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, timeout=HANGS)
    assert done.returncode == 0, f"{program}: status {done.returncode}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_step_has_the_eager_bits(tmp_path, package: Path, family: str, dtype: str) -> None:
    run(tmp_path, package, f"equal({dtype!r}, 0, 2, SMALL | {dict(model_type=family, **FAMILIES[family])})")


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_run_from_a_directory_is_captured(tmp_path, package: Path, family: str) -> None:
    run(tmp_path, package, f"FAMILY, MORE = {family!r}, {FAMILIES[family]}\n{TRAIN}")
