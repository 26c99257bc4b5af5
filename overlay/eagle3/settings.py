"""What a run is asked to do, and the learning rate that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

DEFAULT_DRAFT_VOCABULARY = 32768
STEPS_WITHOUT_END = 1000  # what the warm-up is a fraction of, in a run that goes on until it is stopped


@dataclass(frozen=True)
class Settings:
    """What shapes the result. A resumed run must have the same; None is filled in from the data when the run is
    made."""

    features: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    style: str = "llama"
    init: str = "target"
    train_head: bool = True
    ttt_steps: int = 3
    step_weight: float = 0.8
    epochs: int = 3
    steps: int | None = None
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    batch_tokens: int = 2048
    max_length: int = 4096
    holdout: float = 0.05
    seed: int = 0
    checkpoint_every: int = 100
    dtype: str = "auto"
    attention: str = "auto"
    compile: bool | None = None


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up to the peak, then a cosine to zero; where nobody knows the last step, the peak. `step` counts from
    1."""
    warmup = max(1, round(settings.warmup * (settings.steps or STEPS_WITHOUT_END)))
    if step <= warmup:
        return settings.learning_rate * step / warmup
    if settings.steps is None:
        return settings.learning_rate
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (settings.steps - warmup + 1)))
