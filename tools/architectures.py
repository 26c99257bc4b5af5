"""What capture does with every architecture that generates text: a tiny random checkpoint of each through the real
engine on the CPU, all layers captured, compared with transformers or with itself.

    python3 tools/architectures.py 0.32.0                      # all that are not done with these sources
    python3 tools/architectures.py 0.32.0 --only GPT2LMHeadModel --again
    python3 tools/architectures.py --readme                    # the table in README.md, from the results that are there

Results are JSON, one file a release, in tests/live/results/architectures. What dies with capture on is run without the
overlay: if it dies then too, vLLM cannot run it here; if not, it is an open fault of ours, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import architecture_fields
from architecture_table import BEGIN, CAPTURED, END, README, RESULTS, Results, Row, column_of, read_results, render
from environments import RELEASES, REPOSITORY, make_environment, run_variables
from readme_table import replace_table

TOLERANCE = 1e-4
RUN = REPOSITORY / "tools" / "architecture_run.py"
# What every result depends on, beside the fields of its own architecture.
SOURCES = (
    "overlay/capture/layers.py",
    "overlay/capture/limits.py",
    "overlay/capture/taps.py",
    "overlay/source/residual.py",
    "tools/architecture_run.py",
    "tools/architecture_models.py",
    "tools/architecture_standins.py",
    "tools/architecture_causes.py",
)
# vLLM 0.16 has no latent attention on a CPU, and computes the same with ordinary attention. In 0.32 states of latent
# attention on a CPU are a third of their size away from transformers'.
VARIABLES = {"0.16.0": {"VLLM_MLA_DISABLE": "1"}, "0.32.0": {"VLLM_MLA_DISABLE": "1"}}
LIST = """
import json
from importlib.metadata import version
from vllm.version import __version__
from vllm.model_executor.models import registry
versions = {name: version(name) for name in ("torch", "transformers")}
tables = [list(registry._TEXT_GENERATION_MODELS), list(registry._VLLM_MODELS)]
print(json.dumps([{"vllm": __version__, **versions}, tables]))
"""


def run_release(release: str, python: Path, variables: dict[str, str], args: argparse.Namespace) -> Results:
    """Run what is asked for and not done yet; the file of results is written after each architecture."""
    answer = subprocess.run([str(python), "-c", LIST], env=variables, stdout=subprocess.PIPE, text=True, check=True)
    versions, (text, every) = json.loads(answer.stdout.splitlines()[-1])
    known = next((one for one in read_results(RESULTS) if one.release == release), None)
    rows = dict(known.architectures) if known else {}
    others = [
        name for name in architecture_fields.BY_TEXT if name in every or not name.endswith("ConditionalGeneration")
    ]
    wanted = args.only or list(dict.fromkeys([*text, *others]))
    todo = [name for name in wanted if args.again or name not in rows or rows[name].digest != digest(name)]
    todo = sorted(todo, key=lambda name: name in rows)[: args.at_most]
    results = Results(release, versions, f"tools/architectures.py {release}", TOLERANCE, rows)
    say(f"{release}: {len(todo)} of {len(wanted)} to run")
    for number, finding in enumerate(find(todo, python, variables), 1):
        row = make_row(finding)
        rows[finding["architecture"]] = row
        results.write(RESULTS)
        said = f": {row.reason}" if row.reason else ""
        say(f"{number}/{len(todo)} {finding['architecture']}: {row.verdict}{said}; {row.seconds:.0f} s")
    return results


def find(names: Sequence[str], python: Path, variables: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What a run shows of each.

    What dies is run once more with weights that vLLM makes itself, which it need not load; and if that dies, without
    the overlay, to see whose death it is.
    """
    first = []
    for finding in run_all(names, python, variables, captured=True):
        if finding["verdict"] == "fails":
            first.append(finding)
        else:
            yield finding
    second = []
    reasons = {finding["architecture"]: finding["reason"] for finding in first}
    for finding in run_all([f"{name}:dummy" for name in reasons], python, variables, captured=True):
        if finding["verdict"] == "fails":
            second.append(finding)
        else:
            before = reasons[finding["architecture"]]
            yield finding | {"reason": f"{finding['reason']}; with weights from transformers: {before}"}
    stock = run_all([f"{one['architecture']}:dummy" for one in second], python, variables, captured=False)
    deaths = {one["architecture"]: one["reason"] for one in stock if one["verdict"] == "fails"}
    for finding in second:
        name = finding["architecture"]
        yield finding | ({"verdict": "cannot be built", "reason": deaths[name]} if name in deaths else {})


def run_all(
    names: Sequence[str], python: Path, variables: dict[str, str], *, captured: bool
) -> Iterator[dict[str, Any]]:
    """Each architecture in a fork of one process of the release's Python."""
    if not names:
        return
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-architectures-") as scratch:
        overlay = {
            "VLLM_OVERLAY": "1",
            "VLLM_OVERLAY_CAPTURE": str(Path(scratch, "store")),
            "VLLM_OVERLAY_LAYERS": "all",
        }
        engine = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        environment = variables | engine | (overlay if captured else {})
        command = [str(python), str(RUN), str(Path(scratch, "models")), *names]
        left = [name.removesuffix(":dummy") for name in names]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    finding = json.loads(line)
                    left.remove(finding["architecture"])
                    yield finding
        for name in left:
            yield {"architecture": name, "verdict": "fails", "reason": f"the runner ended with {process.returncode}"}


def make_row(finding: dict[str, Any]) -> Row:
    names = {field.name for field in dataclasses.fields(Row)}
    blank: dict[str, Any] = {
        "engine_class": "",
        "config": "",
        "dtype": "",
        "layers": 0,
        "rows": 0,
        "difference": None,
        "head": None,
        "logprobs": None,
        "seconds": 0.0,
    }
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    facts = blank | {name: value for name, value in finding.items() if name in names}
    return Row(**facts | {"date": today, "digest": digest(finding["architecture"])})


def digest(architecture: str) -> str:
    """Of the sources that a result depends on."""
    fields = [
        architecture_fields.SIZES,
        architecture_fields.BARE_FIELDS,
        *(
            table.get(architecture)
            for table in (
                architecture_fields.ALIASES,
                architecture_fields.EXTRA,
                architecture_fields.BARE,
                architecture_fields.ENGINE,
                architecture_fields.RENAMED,
            )
        ),
        architecture in architecture_fields.LATENT_ALWAYS,
    ]
    texts = [Path(REPOSITORY, file).read_text(encoding="utf-8") for file in SOURCES]
    return hashlib.sha256(json.dumps([texts, fields], sort_keys=True).encode()).hexdigest()[:16]


def write_readme() -> int:
    table = render(read_results(RESULTS))
    README.write_text(replace_table(README.read_text(encoding="utf-8"), BEGIN, table, END), encoding="utf-8")
    return 0


def say(text: str) -> None:
    print(f"== architectures: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Capture from every architecture of a vLLM release.")
    parser.add_argument("release", nargs="?", metavar="RELEASE", help=f"of {', '.join(RELEASES)}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures (default: all of the release)")
    parser.add_argument("--again", action="store_true", help="run also what is done with these sources (default: skip)")
    parser.add_argument("--at-most", type=int, metavar="N", help="stop after so many (default: run all)")
    parser.add_argument("--python", type=Path, metavar="FILE", help="an environment's Python (default: one is made)")
    help_of_packages = "a folder of packages to add, such as torchvision for processors of images (default: none)"
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help=help_of_packages)
    parser.add_argument("--readme", action="store_true", help="only write the table in README.md")
    args = parser.parse_args()
    if args.readme:
        return write_readme()
    if args.release not in RELEASES:
        parser.error(f"name a release, of {', '.join(RELEASES)}")
    release = RELEASES[args.release]
    python = args.python or make_environment(release) / "bin" / "python"
    began = time.monotonic()
    variables = run_variables(release, python.parent.parent) | VARIABLES.get(args.release, {})
    if args.packages:
        variables["PYTHONPATH"] = str(args.packages)
    results = run_release(args.release, python, variables, args)
    rows = results.architectures
    captured = sum(row.verdict in CAPTURED for row in rows.values())
    still_open = [name for name, row in rows.items() if column_of(row) == "open"]
    say(f"{captured} of {len(rows)} captured; {len(still_open)} open; {(time.monotonic() - began) / 60:.1f} min")
    return 1 if still_open else 0


if __name__ == "__main__":
    sys.exit(main())
