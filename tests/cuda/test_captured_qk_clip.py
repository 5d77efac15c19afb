"""QK-clip beside captured steps: the bits, the logits and the heads of an eager run, on a GPU and on a device that computes with the CPU's
kernels (tests/support/fakes/fake_device.c).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from runs import HANGS

# Weights are scaled between two replays, by the logits of a forward that no graph holds: what a replay reads must be what was scaled.
PROGRAM = """
import json, sys
from pathlib import Path
from graph_programs import same
from graph_training import Run
from runs import TINY
import xtrain as xt
from xtrain.models import GPT2Config, LlamaConfig

kind, changes = sys.argv[1], json.loads(sys.argv[2])
if kind == "gpt2":
    off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    config = GPT2Config(vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4, **off)
else:
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, initializer_range=0.4,
    )
Path("model").mkdir()
Path("model/config.json").write_text(json.dumps(config.to_dict()))
given = dict.fromkeys((name.replace(".", "__") for name in TINY if name.startswith("model.")))
given |= {"model__preset": "model", "optim__lr": 0.03, "optim__qk_clip": 6.0, "optim__qk_clip_every": 3, "steps": 18, **changes}
eager, captured, plain = (
    Run(".", name, name == "captured", **{**given, **more})
    for name, more in (("eager", {}), ("captured", {}), ("plain", {"optim__qk_clip": 0.0, "optim__qk_clip_every": 10}))
)
for run in (eager, captured, plain):
    run.trainer.run()
assert captured.graph.captured and not captured.lines, captured.lines
assert eager.graph is None and eager.records() == captured.records() and same(eager.state(), captured.state())
assert not same(plain.state(), captured.state())
records = captured.records()
measured = [record["step"] for record in records if "max_logit" in record]
assert measured == [3, 6, 9, 12, 15, 18], measured
clipped = {record["step"]: record["qk_clipped"] for record in records if record.get("qk_clipped")}
assert sum(step > 6 for step in clipped) >= 2, clipped  # between replays
"""

MUON = {"optim__name": "muon", "ema": 0.9, "precision": "bfloat16", "grad_accum": 2}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("changes", [{}, {"pack": True}, MUON], ids=["adamw", "packed", "muon"])
def test_captured_steps_are_eager_steps(tmp_path, package: Path, kind: str, changes: dict) -> None:
    paths = os.pathsep.join(map(str, (package, ROOT / "tests/support", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, json.dumps(changes)],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout}{done.stderr}"
