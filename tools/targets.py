"""What the patches need of a vLLM release, read from its files; nothing of vLLM is imported.

    python tools/targets.py read 0.33.0            # of the package index; or a wheel, or a folder that holds vllm/
    python tools/targets.py regenerate 0.33.0      # record what the watched names look like there
    python tools/targets.py diff 0.32.0 0.33.0     # what changed between two recorded releases

Needs an environment with this project installed. `read` ends with 1 if a patch would fail on the release, and says for
each what was expected, what was found and what to do. What is recorded is in tests/contract/targets.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from differences import describe_changes
from environments import NoInterpreter
from packaging.version import Version
from target_history import NotRecorded, TargetHistory, load_history, save_history
from tqdm import tqdm
from vllm_source import is_release, open_source
from watched import list_watched_names

from vllm_overlay.compat.releases import SUPPORTED, UnsupportedRelease, resolve_release
from vllm_overlay.patches import PATCHES
from vllm_overlay.source.definitions import Definition, Definitions
from vllm_overlay.source.fit import Fit, describe, judge, list_targets
from vllm_overlay.source.vllm_source import SourceError


@dataclasses.dataclass(frozen=True)
class Reading:
    """A release as the patches see it. `changes`, by target, are those since the release that it is treated as."""

    release: str
    distribution: str
    treated_as: str
    fits: tuple[Fit, ...]
    changes: dict[str, list[str]]

    @property
    def failing(self) -> list[Fit]:
        return [fit for fit in self.fits if fit.state == "would fail"]


def treat(release: str) -> str:
    """The supported release that activation would treat this one as, under the policy `warn`.

    Errors: UnsupportedRelease.
    """
    return resolve_release(release, policy="warn", stands_for=None)


def read(where: str, release: str | None, history: TargetHistory) -> Reading:
    """Judge every patch on the vLLM at a place. Errors: SourceError, UnsupportedRelease."""
    source = open_source(where, release)
    treated_as = treat(source.release)
    definitions = Definitions(source)
    known_looks = history.definitions.get(treated_as, {})
    fits = tuple(judge(patch, treated_as, definitions.find, known_looks.get) for patch in PATCHES)
    looks = {name: definitions.look_at(name) for fit in fits for name in fit.definitions}
    fits = tuple(dataclasses.replace(fit, definitions={name: looks[name] for name in fit.definitions}) for fit in fits)
    changes = {name: describe_changes(known_looks[name], look) for name, look in looks.items() if name in known_looks}
    return Reading(source.release, source.distribution, treated_as, fits, changes)


def run_read(args: argparse.Namespace) -> int:
    reading = read(args.source, args.release, load_history())
    print(json.dumps(to_json(reading), indent=1) if args.json else "\n".join(write_report(reading)))
    return 1 if reading.failing else 0


def write_report(reading: Reading) -> Iterable[str]:
    yield f"vLLM {reading.release}, read from {reading.distribution}, treated as {reading.treated_as}"
    for fit in reading.fits:
        yield f"{fit.patch}: {fit.state}"
        for name, definition in fit.definitions.items():
            restored = ", and the patch puts it there" if name in fit.restored else ""
            yield f"    {name}: {describe(definition)}{restored}"
            yield from (f"        {line}" for line in describe_context(definition, fit.relies_on[name]))
            yield from (f"        since {reading.treated_as}: {change}" for change in reading.changes.get(name, ()))
        if not fit.definitions and fit.state != "not needed":
            yield "    its targets are not in vLLM: only what it imports from vLLM was looked for"
        yield from (f"    FAILS: {misfit}" for misfit in fit.misfits)
    failing = [fit.patch for fit in reading.failing]
    needed = sum(fit.state != "not needed" for fit in reading.fits)
    yield f"{needed - len(failing)} of {needed} patches fit" + (
        f"; would fail: {', '.join(failing)}" if failing else ""
    )


def describe_context(definition: Definition, relies_on: tuple[str, ...]) -> Iterable[str]:
    if relies_on:
        yield f"the patch uses {', '.join(relies_on)}"
    if definition.imported_from:
        yield f"imported from {definition.imported_from}"
    if definition.inherited_from:
        yield f"inherited from {definition.inherited_from}"
    if definition.bound_in:
        yield f"bound by a from-import in {', '.join(definition.bound_in)} too"


def to_json(reading: Reading) -> dict[str, Any]:
    values = dataclasses.asdict(reading)
    for fit in values["fits"]:
        for name, definition in fit["definitions"].items():
            definition |= {"relies_on": fit["relies_on"][name], "changes": reading.changes.get(name, [])}
        del fit["relies_on"]
    del values["changes"]
    return values


def run_regenerate(args: argparse.Namespace) -> int:
    history = load_history()
    names = list_watched_names(PATCHES)
    releases = args.releases or sorted({*history.releases, *SUPPORTED}, key=Version)
    unknown = [release for release in releases if not is_release(release)]
    if unknown:
        raise SourceError(f"no release number: {', '.join(unknown)}")
    for release in tqdm(releases, unit="release"):
        source = open_source(release)
        definitions = Definitions(source)
        looks = {name: definitions.look_at(name) for name in names}
        history = history.with_release(release, source.distribution, looks)
    save_history(history)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    history = load_history()
    for release in (args.before, args.after):
        history.check_release(release)
    users = list_users((args.before, args.after))
    before, after = history.definitions[args.before], history.definitions[args.after]
    changed = 0
    names = sorted(before.keys() & after.keys())
    for name in names:
        changes = describe_changes(before[name], after[name])
        changed += bool(changes)
        suffix = f"  [{', '.join(users[name])}]" if name in users else ""
        print("".join(f"{name}: {change}{suffix}\n" for change in changes), end="")
    print(f"{changed} of {len(names)} watched names changed from {args.before} to {args.after}")
    return 0


def list_users(releases: Iterable[str]) -> dict[str, list[str]]:
    """The patches that have a name among their targets in one of these releases."""
    users: dict[str, list[str]] = {}
    for release in releases:
        for patch in PATCHES:
            for target in list_targets(patch, treat(release)):
                patches = users.setdefault(str(target), [])
                patches += [patch.name] if patch.name not in patches else []
    return users


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What the patches need of a vLLM release, read from its files.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("read", help="say whether each patch fits a release")
    command.add_argument("source", metavar="SOURCE", help="a wheel, a folder that holds vllm/, or a release number")
    command.add_argument("--release", help="the release that the files are of (default: what they say themselves)")
    command.add_argument("--json", action="store_true", help="print JSON (default: text)")
    command.set_defaults(run=run_read)
    command = commands.add_parser("regenerate", help="read releases from the package index and record them")
    command.add_argument("releases", nargs="*", metavar="RELEASE", help="default: all supported and recorded releases")
    command.set_defaults(run=run_regenerate)
    command = commands.add_parser("diff", help="what changed between two recorded releases")
    command.add_argument("before", metavar="A", help="the older release")
    command.add_argument("after", metavar="B", help="the newer release")
    command.set_defaults(run=run_diff)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    try:
        return int(args.run(args))
    except (SourceError, UnsupportedRelease, NotRecorded, NoInterpreter, subprocess.CalledProcessError) as error:
        print(f"targets: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
