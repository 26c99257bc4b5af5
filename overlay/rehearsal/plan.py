"""What a rehearsal is to do and what came of it, as its two processes tell each other."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The longest sequence of the rehearsal, and the tokens that its prompts are made of.
MAX_LENGTH = 256
TOKENS = range(8, 250)
# Where the small model and all that is written of it lies; known to every process of the rehearsal.
FOLDER_VARIABLE = "_VLLM_OVERLAY_REHEARSAL"

MODEL, STORE, LOG, STAGE = "model", "store", "log.txt", "stage.txt"
_PLAN, _OUTCOME = "plan.json", "outcome.json"

Verdict = Literal["equal", "consistent", "wrong", "died"]


@dataclass(frozen=True)
class RehearsalPlan:
    """`dtype` as vLLM takes it. `from_transformers`: weights that transformers makes, where it has the class, and its
    forward to compare with; else vLLM makes them. `special_ids` are token ids that no prompt may hold."""

    dtype: str
    tensor_parallel_size: int
    from_transformers: bool
    trust_remote_code: bool
    is_cpu: bool
    special_ids: tuple[int, ...]

    def write(self, folder: Path) -> None:
        """For the process that runs it."""
        Path(folder, _PLAN).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """What came of it. `reason` is one line: what it died of or what is wrong, or how far transformers' states are;
    `details` is the whole error. `stage` is what was being done last. `ranks` is 0 where it did not come so far.
    `weights_failed` is what loading the weights that transformers saves died of, where others were taken then."""

    verdict: Verdict
    reason: str = ""
    details: str = ""
    stage: str = ""
    model_class: str = ""
    layers: int = 0
    records: int = 0
    rows: int = 0
    difference: float | None = None
    in_weights: bool = False
    weights_failed: str = ""
    timed_out: bool = False
    ranks: int = 0

    def write(self, folder: Path) -> None:
        """For the process that waits for it."""
        draft = Path(folder, f".{_OUTCOME}")
        draft.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        draft.rename(Path(folder, _OUTCOME))


def read_plan(folder: Path) -> RehearsalPlan:
    """What `RehearsalPlan.write` wrote."""
    fields = json.loads(Path(folder, _PLAN).read_text(encoding="utf-8"))
    return RehearsalPlan(**fields | {"special_ids": tuple(fields["special_ids"])})


def read_outcome(folder: Path) -> Outcome | None:
    """What `Outcome.write` wrote; None if the process ended before."""
    file = Path(folder, _OUTCOME)
    return Outcome(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def note_stage(folder: Path, stage: str) -> None:
    """Say what is being done, for the bar and for whoever finds the process dead."""
    Path(folder, STAGE).write_text(stage, encoding="utf-8")


def read_stage(folder: Path) -> str:
    """What was being done last."""
    file = Path(folder, STAGE)
    return file.read_text(encoding="utf-8") if file.is_file() else "starting"
