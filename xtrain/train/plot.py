"""The loss curve of a run, drawn by matplotlib (the extra `plot`) without a display."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ..files import write_file
from .metrics import read_metrics

HINT = "loss.png is drawn by matplotlib: pip install 'xtrain[plot]'"


def new_figure(width: float, height: float) -> Any:
    """An empty Figure of matplotlib of this size in inches, which needs no display. ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]  (an extra)
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  (an extra)

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_loss(
    run: str | os.PathLike[str], bytes_per_token: float | None = 1.0, path: str | os.PathLike[str] | None = None
) -> Path:
    """Draw training and validation loss of the run in directory `run` and return the path of the picture.

    In bits per byte when `bytes_per_token` is known, else in nats per token. `path` is loss.png in the run unless
    given; its ending (.png, .svg, .pdf) is the format. Raises ImportError when matplotlib is missing and
    OSError when the picture cannot be written; then an earlier one is untouched.
    """
    figure = new_figure(8.0, 4.5)
    run = Path(run)
    records = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    scale = 1.0 if not bytes_per_token else 1.0 / (math.log(2.0) * bytes_per_token)
    steps = [record["step"] for record in records]
    losses = [record["loss"] * scale for record in records]
    evaluated = [record for record in records if "val_loss" in record]

    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#9db8d9", linewidth=0.8, label="training, each step")
    axes.plot(steps, _smooth(losses), color="#1f4e8c", linewidth=1.6, label="training, smoothed")
    if evaluated:
        axes.plot(
            [record["step"] for record in evaluated],
            [record["val_loss"] * scale for record in evaluated],
            color="#c44e1b",
            marker="o",
            markersize=4,
            linewidth=1.2,
            label=f"validation: {evaluated[-1]['val_loss'] * scale:.3f} at the end",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte" if bytes_per_token else "nats per token")
    axes.set_title(run.resolve().name)
    axes.grid(alpha=0.3)
    axes.legend()
    file = run / "loss.png" if path is None else Path(path)
    kind = file.suffix[1:] or "png"
    write_file(file, lambda stream: figure.savefig(stream, format=kind), follow=path is not None)
    return file


def _smooth(values: list[float], window: float = 20.0) -> list[float]:
    """Exponential moving average without the bias towards its start; values that are not finite are left out."""
    smooth, weight, result = 0.0, 0.0, []
    for value in values:
        if not math.isfinite(value):  # and would stay so
            result.append(math.nan)
            continue
        smooth += (value - smooth) / window
        weight += (1.0 - weight) / window
        result.append(smooth / weight)
    return result
