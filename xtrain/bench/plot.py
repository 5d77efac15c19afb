"""Bars of a benchmark, drawn by matplotlib (the extra `plot`) without a display."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_file
from ..train.plot import new_figure
from .frame import headline

COLORS = {
    "bf16": "#0f2a50",
    "blas": "#1f4e8c",
    "cublas": "#1f4e8c",
    "tiled": "#6f9fd8",
    "naive": "#c3d5ea",
    "NumPy": "#e0a030",
    "PyTorch": "#c44e1b",
}
OTHERS = ("#4b8f5a", "#8a5fa8", "#7f7f7f")


def plot_gemm(path: str | os.PathLike[str], facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """GFLOP/s (TFLOP/s on a GPU) of every contender, a group of bars a shape, a panel a dtype. The file appears whole
    or not at all.
    """
    measured = [record for record in records if "gflops" in record]
    dtypes = list(dict.fromkeys(record["dtype"] for record in measured))
    names = list(dict.fromkeys(record["contender"] for record in measured))
    spare = iter(OTHERS * len(names))
    colors = {name: COLORS.get(name) or next(spare) for name in names}
    shapes = list(dict.fromkeys((r["shape"], r["layout"], r["label"]) for r in measured))
    width = 0.8 / max(len(names), 1)
    unit, scale = ("GFLOP/s", 1.0) if facts["device"] == "cpu" else ("TFLOP/s", 1e-3)

    figure = new_figure(max(6.0, 1.2 * len(shapes) + 2.0), 3.6 * len(dtypes))
    figure.suptitle(headline(facts), fontsize="small")
    panels = figure.subplots(len(dtypes), 1, squeeze=False)[:, 0]
    for axes, dtype in zip(panels, dtypes):
        for i, name in enumerate(names):
            found = {
                (r["shape"], r["layout"], r["label"]): r["gflops"] * scale
                for r in measured
                if r["dtype"] == dtype and r["contender"] == name
            }
            places = [x + (i - (len(names) - 1) / 2) * width for x, shape in enumerate(shapes) if shape in found]
            heights = [found[shape] for shape in shapes if shape in found]
            if places:
                axes.bar(places, heights, width, label=name, color=colors[name])
        axes.set_xticks(range(len(shapes)), [f"{s}\n{layout} {label}".strip() for s, layout, label in shapes])
        axes.tick_params(axis="x", labelsize="x-small")
        axes.set_ylabel(f"{dtype}: {unit}")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small")
    kind = Path(path).suffix.lower().lstrip(".")
    write_file(path, lambda stream: figure.savefig(stream, format=kind))


def plot_ops(path: str | os.PathLike[str], facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """The part of a copy's rate that every op reaches, forward and backward. The file appears whole or not at all."""
    measured = [r for r in records if any(r.get(p, {}).get("percent_of_copy") for p in ("forward", "backward"))]
    names = [" ".join(word for word in (r["op"], r["dtype"], r["backend"]) if word) for r in measured]
    figure = new_figure(8.0, 0.22 * max(len(measured), 4) + 1.5)
    figure.suptitle(headline(facts), fontsize="small")
    axes = figure.add_subplot()
    for pass_, shift, color in (("forward", -0.2, "#1f4e8c"), ("backward", 0.2, "#e0a030")):
        heights = [r.get(pass_, {}).get("percent_of_copy") or 0.0 for r in measured]
        axes.barh([i + shift for i in range(len(measured))], heights, 0.4, label=pass_, color=color)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(f"% of the rate of a copy ({facts['copy']['gb_per_s']:.1f} GB/s)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="small")
    kind = Path(path).suffix.lower().lstrip(".")
    write_file(path, lambda stream: figure.savefig(stream, format=kind))
