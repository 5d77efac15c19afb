"""The table of training steps on a GPU, from recorded results: python parity/bench/report.py [RESULTS.jsonl]

RESULTS.jsonl is what `gpu_step.py --json` wrote. Of each config and precision it takes the rows of the last run there, puts them into
docs/worklog/gpu-steps.jsonl in the place of older ones, and writes the table into README.md and docs/worklog/train-step-gpu.md, between
the comments `gpu-steps` and `/gpu-steps`. Without RESULTS.jsonl it writes the table of what is recorded. A test compares both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "docs/worklog/gpu-steps.jsonl"
PAGES = [ROOT / "README.md", ROOT / "docs/worklog/train-step-gpu.md"]
BEGIN, END = "<!-- gpu-steps: written by parity/bench/report.py -->\n", "<!-- /gpu-steps -->\n"
PEERS = {"eager": "PyTorch eager", "compile": "torch.compile", "graphs": "torch.compile, CUDA graphs"}
CONFIGS = {  # what it is, and the ratio that we aim at
    ("0.6B-1k", "bfloat16"): ("Qwen3-0.6B shape, 32 x 1024", 1.2),
    ("0.6B-4k", "bfloat16"): ("Qwen3-0.6B shape, 8 x 4096", 1.2),
    ("0.6B-16k", "bfloat16"): ("Qwen3-0.6B shape, 2 x 16384", 1.08),
    ("0.6B-32k", "bfloat16"): ("Qwen3-0.6B shape, 1 x 32768", 1.03),
    ("wide", "bfloat16"): ("6 layers of 4096, 4 x 2048", 1.1),
    ("124M", "bfloat16"): ("124 M, 64 x 1024", 1.1),
    ("gpt2", "bfloat16"): ("GPT-2, 64 x 1024", 1.2),
    ("qwen2.5-0.5B", "bfloat16"): ("Qwen2.5-0.5B shape, 32 x 1024", 1.2),
    ("seed32", "bfloat16"): ("67 M, 32 x 256", 1.45),
    ("seed16", "tf32"): ("67 M, 16 x 256, TF32", 1.3),
    ("5M", "bfloat16"): ("5 M, 8 x 256", 2.5),
}


def read(path: Path) -> dict[tuple[str, str], list[dict]]:
    """Rows of the last run of each config and precision: one run has each contender once."""
    runs: dict[tuple[str, str], list[dict]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        run = runs.setdefault((row["config"], row["precision"]), [])
        if row["contender"] in [other["contender"] for other in run]:
            run.clear()
        run.append(row)
    return runs


def table(runs: dict[tuple[str, str], list[dict]]) -> str:
    lines = [
        "| step | xtrain | tokens/s | peer | ratio | goal | memory, GiB | commit |",
        "|---|---:|---:|---|---:|---:|---:|---|",
    ]
    for key, (name, goal) in CONFIGS.items():
        run = {row["contender"]: row for row in runs.get(key, [])}
        ours = run.get("captured") or run.get("xtrain")
        for peer in PEERS:
            if ours and peer in run:
                ratio = f"{run[peer]['ms'] / ours['ms']:.2f}"
                lines.append(
                    f"| {name} | {ours['ms']:.2f} ms | {ours['tokens_per_second']:,} | {PEERS[peer]}, {run[peer]['ms']:.2f} ms "
                    f"| {ratio} | {goal} | {ours['peak_GiB']}, {run[peer]['peak_GiB']} | {ours['commit']} |"
                )
    rows = [row for run in runs.values() for row in run]
    where = sorted({f"{row['device']}, PyTorch {row['torch']}" for row in rows})
    return (
        "\n".join(lines)
        + f"\n\n{'; '.join(where)}. Each row is a run of its own, both in turns; memory is xtrain's, the peer's.\n"
    )


def written(text: str, block: str) -> str:
    before, _, rest = text.partition(BEGIN)
    if not rest or END not in rest:
        raise ValueError(f"no comments {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + block + END + rest.partition(END)[2]


def main() -> None:
    runs = read(RECORDED)
    if sys.argv[1:]:
        runs |= read(Path(sys.argv[1]))
        order = [key for key in CONFIGS if key in runs] + [key for key in runs if key not in CONFIGS]
        RECORDED.write_text("".join(json.dumps(row) + "\n" for key in order for row in runs[key]))
    for page in PAGES:
        page.write_text(written(page.read_text(), table(runs)))


if __name__ == "__main__":
    main()
