"""Every patch against the installed vLLM, as activation would find it."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_overlay.check.installation import Installation
from vllm_overlay.check.line import Line
from vllm_overlay.patches import PATCHES
from vllm_overlay.source.fit import judge


def check_patches(installation: Installation) -> Iterator[Line]:
    """One line if all fit; one for each that does not. Errors: SourceError."""
    expected = "every target where the patch looks for it, with the parameters it uses"
    fits = [judge(patch, installation.release, installation.definitions.find) for patch in PATCHES]
    for fit in fits:
        for misfit in fit.misfits:
            advice = "import vllm would be refused: use a supported release, or report this one"
            yield Line(f"patch {fit.patch}", "fails", expected, misfit, advice)
    fitting = sum(fit.state == "fits" for fit in fits)
    not_needed = sum(fit.state == "not needed" for fit in fits)
    if fitting + not_needed == len(fits):
        yield Line("patches", "ok", expected, f"{fitting} fit, {not_needed} not needed in {installation.release}")
