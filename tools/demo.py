"""The whole pipeline once, on SmolLM2-135M-Instruct and a real vLLM on this machine's CPU.

    sh tools/demo.sh                         # into ./demo-output
    sh tools/demo.sh --output FOLDER
    sh tools/demo.sh --resume                # after an interruption: only the stages that are not done

Every stage is the `vllm-overlay` command that a user would type, and is printed before it runs. The first that fails
stops the demonstration. The last thing printed is the table of what was captured, trained and measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments import RELEASES, REPOSITORY, NoInterpreter, make_environment

RELEASE = "0.32.0"  # runs speculative decoding on a CPU
ENGINE = ("--", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512")
# Chosen for two cores and 20 minutes, most of which the engines need.
TRAINING_PROMPTS = 200
ANSWER_TOKENS = 96
TRAINING = ("--draft-vocab-size", "4096", "--batch-tokens", "512", "--epochs", "4", "--checkpoint-every", "50")
DRAFT_TOKENS = 3
EVALUATION_TOKENS = 64

NOTES = "stages.json"


class DemoFailed(Exception):
    """A stage failed, or the output folder is somebody else's. One line."""


@dataclass
class Demo:
    """One run in its output folder. `seconds`: by stage, those that are done; kept in a file for --resume."""

    folder: Path
    bin_folder: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def make_environment(self) -> None:
        """Not skipped on --resume: an environment that is there takes a few seconds, and brings the tree's own code."""
        began = time.monotonic()
        say(f"environment: vLLM {RELEASE} on the CPU")
        self.bin_folder = make_environment(RELEASES[RELEASE]) / "bin"
        self.note("environment", time.monotonic() - began)

    def run(self, stage: str, program: str, *words: str | Path, into: str | None = None) -> None:
        """Run a program of the environment in the output folder, unless the stage is done. `into`: a file for its
        stdout. Errors: DemoFailed.
        """
        if stage in self.seconds:
            say(f"{stage}: done before")
            return
        assert self.bin_folder is not None
        command = [program, *map(str, words)]
        say(f"{stage}: {shlex.join(command)}{f' > {into}' if into else ''}")
        began = time.monotonic()
        done = subprocess.run(
            [str(self.bin_folder / program), *command[1:]],
            cwd=self.folder,
            env=stage_environment(self.bin_folder),
            stdout=subprocess.PIPE if into else None,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise DemoFailed(f"stage {stage} ended with exit status {done.returncode}; what it said is above")
        if into:
            (self.folder / into).write_text(done.stdout, encoding="utf-8")
        self.note(stage, time.monotonic() - began)

    def note(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = seconds
        (self.folder / NOTES).write_text(json.dumps(self.seconds, indent=2) + "\n", encoding="utf-8")

    def read_json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


def stage_environment(bin_folder: Path) -> dict[str, str]:
    """This process's variables with none of vLLM's or ours, and what a stage needs on a small CPU."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON"))}
    return kept | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        # Threads that wait for each other by spinning are ten times slower when another process wants the core.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }


def open_output(folder: Path, *, resume: bool) -> Demo:
    """An output folder that is empty but for what --resume takes up. Errors: DemoFailed."""
    notes = folder / NOTES
    if folder.exists() and any(folder.iterdir()) and not notes.is_file():
        raise DemoFailed(f"{folder} is not empty and no demonstration wrote it: name another --output")
    if resume and notes.is_file():
        return Demo(folder, seconds=json.loads(notes.read_text(encoding="utf-8")))
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    notes.write_text("{}\n", encoding="utf-8")
    return Demo(folder)


def run_stages(demo: Demo) -> None:
    demo.make_environment()
    demo.run("model", "python", REPOSITORY / "tools" / "smollm2.py", into="model.txt")
    model = (demo.folder / "model.txt").read_text(encoding="utf-8").strip()
    target = ("--model", model)
    demo.run("prompts", "python", REPOSITORY / "tools" / "prompts.py", "prompts")
    take_evenly(demo.folder / "prompts" / "train.jsonl", demo.folder / "prompts" / "chosen.jsonl", TRAINING_PROMPTS)

    overlay = "vllm-overlay"
    answers = ("--regenerate", "--max-tokens", str(ANSWER_TOKENS))
    demo.run("prepare", overlay, "prepare", "prompts/chosen.jsonl", *target, "-o", "dataset", *answers, *ENGINE)
    demo.run("capture", overlay, "capture", "dataset", *target, "-o", "store", *ENGINE)
    demo.run("inspect", overlay, "inspect", "store", "--json", "--plot", "norms.png", into="store.json")
    resume = ("--resume",) if (demo.folder / "run").exists() else ()
    demo.run("train", overlay, "train", "store", *target, "-o", "run", *TRAINING, *resume)
    for name, checkpoint in (("untrained", "untrained"), ("draft", "best")):
        demo.run(f"export {name}", overlay, "export", "run", "-o", name, "--checkpoint", checkpoint)
        held_out = ("--prompts", "prompts/held_out.jsonl")
        sizes = ("--draft-tokens", str(DRAFT_TOKENS), "--max-tokens", str(EVALUATION_TOKENS))
        words = ("evaluate", name, *target, *held_out, *sizes, "--json", *ENGINE)
        demo.run(f"evaluate {name}", overlay, *words, into=f"{name}.json")


def take_evenly(source: Path, target: Path, count: int) -> None:
    """`count` lines from all over the file: its prompts are ordered by kind."""
    lines = source.read_text(encoding="utf-8").splitlines()
    chosen = [lines[number * len(lines) // count] for number in range(count)]
    target.write_text("\n".join(chosen) + "\n", encoding="utf-8")


def format_table(demo: Demo, total_seconds: float) -> str:
    """What was captured, trained and measured, as text."""
    store, before, after = (demo.read_json(f"{name}.json") for name in ("store", "untrained", "draft"))
    lines = (demo.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if line["kind"] == "train"]
    rows = [
        ("captured", f"{store['rows_in_records']:,} tokens of {store['records']:,} conversations"),
        ("layers", f"{', '.join(map(str, store['layer_ids']))} of {store['num_hidden_layers']}"),
        ("on disk", f"{store['bytes_on_disk']:,} bytes"),
        ("training loss", f"{steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f} in {len(steps)} steps"),
        (
            "acceptance length",
            f"{describe_change(before, after, 'vllm')}  ({DRAFT_TOKENS} draft tokens, vLLM's counters)",
        ),
        ("", f"{describe_change(before, after, 'chain')}  (our chain in torch)"),
        ("served text = plain text", f"{after['texts_equal']} of {after['num_prompts']} held-out prompts"),
    ]
    rows += [(f"  {stage}", f"{seconds:7.1f} s") for stage, seconds in demo.seconds.items()]
    rows.append(("wall time in all", f"{total_seconds:7.1f} s"))
    rows += [
        ("store", str(demo.folder / "store")),
        ("loss and accuracy curve", str(demo.folder / "run" / "curve.png")),
        ("draft for vLLM", str(demo.folder / "draft")),
    ]
    return "\n".join(f"{name:26}{value}" for name, value in rows)


def describe_change(before: dict[str, Any], after: dict[str, Any], method: str) -> str:
    return f"{before[method]['acceptance_length']:.3f} -> {after[method]['acceptance_length']:.3f}"


def say(text: str) -> None:
    print(f"== demo: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Capture, train, export, serve and evaluate SmolLM2-135M on a CPU.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the stages done in the folder (default: start anew, empty it)"
    )
    args = parser.parse_args()
    began = time.monotonic()
    try:
        demo = open_output(args.output.absolute(), resume=args.resume)
        run_stages(demo)
    except (DemoFailed, NoInterpreter, subprocess.CalledProcessError) as error:
        say(f"FAILED: {error}")
        return 1
    table = format_table(demo, time.monotonic() - began)
    (demo.folder / "summary.txt").write_text(table + "\n", encoding="utf-8")
    say(f"done; the same table is in {demo.folder / 'summary.txt'}\n\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
