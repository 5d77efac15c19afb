"""What checking a saved model costs when it is loaded: the same files with their manifest and without it, in turns.

    python parity/bench/cold_load.py [--gib 2] [--rounds 7] [--folder DIR]

Each load is a process of its own that reads every tensor into memory. Cold: the file has left the page cache before (fadvise). Warm: it is
in the page cache. Printed: medians of the seconds of a load, without import, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LOAD = """
import sys, time
import xtrain as xt
from xtrain.saving.reader import DirectoryReader
from xtrain.saving.safetensors import SafetensorsFile
begun = time.perf_counter()
directory = DirectoryReader(sys.argv[1])
with SafetensorsFile(directory.open("model.safetensors")) as file:
    tensors = {name: file.tensor(name) for name in file.entries}
print(time.perf_counter() - begun)
"""


def leave_cache(path: Path) -> None:
    """Have the kernel drop the file's pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(directory: Path, cold: bool) -> float:
    """Seconds of one load."""
    weights = directory / "model.safetensors"
    if cold:
        leave_cache(weights)
    else:
        weights.read_bytes()
    done = subprocess.run([sys.executable, "-c", LOAD, str(directory)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder")
    args = parser.parse_args()

    from xtrain import saving
    from xtrain.models import Qwen3, Qwen3Config

    layers = max(1, round(args.gib * 2**30 / (4 * 16 * 2**20)))  # 16 M parameters in float32 each
    config = Qwen3Config(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checked, plain = Path(folder, "checked"), Path(folder, "plain")
        saving.save_model(Qwen3(config), checked)
        shutil.copytree(checked, plain)
        (plain / saving.directory.MANIFEST).unlink()
        size = (checked / "model.safetensors").stat().st_size
        for cold in (True, False):
            times: dict[Path, list[float]] = {checked: [], plain: []}
            for _ in range(args.rounds):
                for directory, seconds in times.items():
                    seconds.append(load(directory, cold))
            with_manifest, without = (statistics.median(times[path]) for path in (checked, plain))
            print(
                f"{'cold' if cold else 'warm'}: {size / 2**30:.2f} GiB, checked {with_manifest:.3f} s, unchecked {without:.3f} s, "
                f"ratio {with_manifest / without:.3f}; unchecked {size / without / 1e9:.2f} GB/s"
            )


if __name__ == "__main__":
    main()
