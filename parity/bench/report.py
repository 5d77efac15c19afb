"""The table of training steps on a GPU, from recorded results: python parity/bench/report.py [RESULTS.jsonl]

RESULTS.jsonl is what `gpu_step.py --json` wrote. Of each config and precision it takes the rows of the last run there, puts them into
docs/worklog/gpu-steps.jsonl in the place of older ones, and writes the table into README.md and docs/worklog/train-step-gpu.md, between
the comments `gpu-steps` and `/gpu-steps`. Without RESULTS.jsonl it writes the table of what is recorded. A test compares both. Runs with the
contender `captured-cheap` are kept beside those without it, and have a row of their own, speed and memory of the same run.

Memory is peak_GiB of both. Beside torch.compile with CUDA graphs, whose pool PyTorch does not count, it is reserved_GiB of both; - where
that was not recorded.

Written by hand, and not by this program: the table of the 67 M model in README.md (`gpu_step.py --configs seed16`), all other tables of
docs/worklog/train-step-gpu.md (gpu_step.py, gpu_budget.py, gpu_memory.py), and those of attention (`xtrain bench attention --json`), of products
and of generation. Rows that it keeps and does not show: those of configs outside CONFIGS, of the looped contenders, and host_us.
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
CHEAP = "captured-cheap"
CONFIGS = {  # what it is, and the ratio that we aim at
    ("0.6B-1k", "bfloat16"): ("Qwen3-0.6B shape, 32 x 1024", 1.2),
    ("0.6B-4k", "bfloat16"): ("Qwen3-0.6B shape, 8 x 4096", 1.2),
    ("0.6B-16k", "bfloat16"): ("Qwen3-0.6B shape, 2 x 16384", 1.08),
    ("0.6B-32k", "bfloat16"): ("Qwen3-0.6B shape, 1 x 32768", 1.03),
    ("wide", "bfloat16"): ("6 layers of 4096, 4 x 2048", 1.1),
    ("124M", "bfloat16"): ("124 M, 64 x 1024", 1.1),
    ("gpt2", "bfloat16"): ("GPT-2, 64 x 1024", 1.2),
    ("gpt2-padded", "bfloat16"): ("GPT-2, a vocabulary of 50304, 64 x 1024", 1.2),
    ("qwen2.5-0.5B", "bfloat16"): ("Qwen2.5-0.5B shape, 32 x 1024", 1.2),
    ("seed32", "bfloat16"): ("67 M, 32 x 256", 1.45),
    ("seed16", "tf32"): ("67 M, 16 x 256, TF32", 1.3),
    ("5M", "bfloat16"): ("5 M, 8 x 256", 2.5),
}


Key = tuple[str, str, bool]  # config, precision, and whether `captured-cheap` took part


def read(path: Path) -> dict[Key, list[dict]]:
    """Rows of the last run of each key. One run has one command, and each contender once."""
    runs: list[list[dict]] = []
    places = ("config", "precision", "command")
    for row in map(json.loads, path.read_text().splitlines()):
        run = runs[-1] if runs else []
        same = run and all(row.get(place) == run[0].get(place) for place in places)
        if not same or row["contender"] in [other["contender"] for other in run]:
            runs.append([])
        runs[-1].append(row)
    return {(run[0]["config"], run[0]["precision"], any(row["contender"] == CHEAP for row in run)): run for run in runs}


def memory(ours: dict, peer: dict) -> tuple[str, str]:
    """Both numbers in GiB, and their ratio."""
    key = "reserved_GiB" if peer["contender"] == "graphs" else "peak_GiB"
    if key not in ours or key not in peer:
        return f"{ours['peak_GiB']}, -", "-"
    return f"{ours[key]}, {peer[key]}", f"{ours[key] / peer[key]:.3f}"


def lines_of(name: str, goal: float, ours: dict | None, run: dict[str, dict]) -> list[str]:
    """A line for each peer in the run, by contender."""
    lines = []
    for peer, title in PEERS.items():
        if ours and peer in run:
            other = run[peer]
            sizes, part = memory(ours, other)
            lines.append(
                f"| {name} | {ours['ms']:.2f} ms | {ours['tokens_per_second']:,} | {title}, {other['ms']:.2f} ms "
                f"| {other['ms'] / ours['ms']:.3f} | {goal} | {sizes} | {part} | {ours['commit']} |"
            )
    return lines


def table(runs: dict[Key, list[dict]]) -> str:
    lines = [
        "| step | xtrain | tokens/s | peer | ratio | goal | memory, GiB | memory ratio | commit |",
        "|---|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    for key, (name, goal) in CONFIGS.items():
        plain, cheap = ({row["contender"]: row for row in runs.get((*key, flag), [])} for flag in (False, True))
        plain = plain or cheap
        lines += lines_of(name, goal, plain.get("captured") or plain.get("xtrain"), plain)
        lines += lines_of(f"{name}, recompute cheap", goal, cheap.get(CHEAP), cheap)
    rows = [row for run in runs.values() for row in run]
    where = sorted({f"{row['device']}, PyTorch {row['torch']}" for row in rows})
    return (
        "\n".join(lines)
        + f"\n\n{'; '.join(where)}. Each row is a run of its own, both in turns. Memory is xtrain's, the peer's, at most at once.\n"
        "PyTorch does not count the pool of its CUDA graphs: there it is what each has taken from the driver, and xtrain's alone\n"
        "where that was not measured (-).\n"
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
        shown = [(*key, flag) for key in CONFIGS for flag in (False, True)]
        order = [key for key in shown if key in runs] + [key for key in runs if key not in shown]
        RECORDED.write_text("".join(json.dumps(row) + "\n" for key in order for row in runs[key]))
    for page in PAGES:
        page.write_text(written(page.read_text(), table(runs)))


if __name__ == "__main__":
    main()
