"""The learning curve as a picture: loss and first-position accuracy over the steps, trained and held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]  # one line of metrics.jsonl


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each point."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def plot_curve(lines: Sequence[Line], path: Path) -> None:
    """Draw metrics.jsonl to a PNG, written beside the target first and then renamed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "validation"]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    window = max(1, len(train) // 12)
    steps = [line["step"] for line in train]

    loss = [line["loss_per_step"][0] for line in train]
    loss_axes.plot(steps, loss, color="#9ecae1", linewidth=0.8)
    loss_axes.plot(steps, smooth(loss, window), color="#2171b5", linewidth=1.8, label="trained on")
    if held_out:
        held_out_loss = [line["loss_per_step"][0] for line in held_out]
        loss_axes.plot(
            [line["step"] for line in held_out], held_out_loss, "o-", color="#d94801", markersize=4, label="held out"
        )
    loss_axes.set(title="Loss at the first draft position", xlabel="step", ylabel="soft cross-entropy, nats")

    shades = ["#1b7837", "#762a83", "#e08214", "#4393c3", "#969696"]
    for position in range(len(train[0]["accuracy"]) if train else 0):
        color = shades[min(position, len(shades) - 1)]
        values = smooth([100 * line["accuracy"][position] for line in train], window)
        accuracy_axes.plot(steps, values, color=color, linewidth=1.5, label=f"position {position + 1}")
        if held_out:
            points = [100 * line["accuracy"][position] for line in held_out]
            accuracy_axes.plot(
                [line["step"] for line in held_out], points, "o--", color=color, markersize=4, linewidth=0.8
            )
    title = "Agreement with the target" + (" (dashed: held out)" if held_out else "")
    accuracy_axes.set(title=title, xlabel="step", ylabel="first choice the same, %")
    accuracy_axes.set_ylim(0, 100)
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)

    FigureCanvasAgg(figure)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=130, format="png")
    temporary.replace(path)
