"""The class that will serve the model in this vLLM, its embeddings, and whether a draft can be served with it."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from vllm_overlay.activation import PLUGIN_NAME
from vllm_overlay.check.installation import Installation
from vllm_overlay.check.line import Line, Verdict
from vllm_overlay.check.model import ModelFacts
from vllm_overlay.source.classes import find_method
from vllm_overlay.source.decoder import Decoder, Unread, find_decoder
from vllm_overlay.source.definitions import Found
from vllm_overlay.source.registry import MODULE, Entry, Registry, read_registry
from vllm_overlay.source.transformers_names import read_causal_names

_GENERATING = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_BACKEND = "vllm.model_executor.models.transformers"
_TRY_FIRST = "capture a few requests before a long run"

_INTERFACES = "vllm.model_executor.models.interfaces"
_INTERFACES_BASE = "vllm.model_executor.models.interfaces_base"
_SPECULATIVE_CONFIG = "vllm.config.speculative"

# A local variable in the releases before 0.22, under the one name or the other.
_ALLOWED_TYPES = ("eagle3_target_supported", "aux_hidden_states_supported")

# The method that turns token ids into rows; its name changed in 0.11.1, and this vLLM's own protocol says which it is.
_EMBEDDING_METHODS = ("embed_input_ids", "get_input_embeddings")


@dataclass(frozen=True)
class Served:
    """The class behind an architecture, and its decoder layers as far as they can be read."""

    architecture: str
    entry: Entry
    found: Found
    decoder: Decoder | Unread


def find_served(facts: ModelFacts, installation: Installation) -> Served | Line:
    """The class that serves the model, or why there is none to read. Errors: SourceError."""
    definitions = installation.definitions
    registry = read_registry(definitions)
    known = next((one for one in facts.architectures if one in registry.entries), None)
    if known is None:
        return _describe_unknown(facts, registry, installation)
    entry = registry.entries[known]
    expected = "a class for the architecture in vLLM's registry"
    if entry.module.startswith(_BACKEND):
        found = f"{known} is served by vLLM's Transformers backend, {entry.name}; not read: transformers' own layers"
        return Line("architecture", "warning", expected, found, _TRY_FIRST)
    found_class = definitions.find_class(entry.module, entry.name)
    if found_class is None:
        if definitions.find(entry.module).kind == "absent":
            found = f"{known} is {entry.name} in {entry.module}, which is not in the installed vLLM"
            return Line("architecture", "fails", expected, found, "reinstall vLLM: a file of it is missing")
        found = f"{known} is {entry.name} in {entry.module}; not read: the module makes it when it is asked for"
        return Line("architecture", "warning", expected, found, _TRY_FIRST)
    text_architecture = facts.text_architecture or _find_by_type(facts, installation)
    return Served(known, entry, found_class, find_decoder(definitions, registry, found_class, text_architecture))


def check_architecture(served: Served, facts: ModelFacts, installation: Installation) -> Iterator[Line]:
    """The class, the method for embeddings, and the EAGLE-3 interface."""
    definitions = installation.definitions
    shown = _show(served.found, installation)
    through = served.decoder.through[1:] if isinstance(served.decoder, Decoder) else ()
    steps = f", text through {' > '.join(name.rpartition(':')[2] for name in through)}" if through else ""
    alias = "" if served.architecture == served.found.path else f"{served.architecture} is "
    found = f"{alias}{shown}{steps}"
    expected = "a class that generates text"
    if served.entry.table not in _GENERATING:
        yield Line(
            "architecture", "warning", expected, f"{found}, of {served.entry.table}", "it may not generate tokens"
        )
    else:
        yield Line("architecture", "ok", expected, found)
    yield _check_embedding(served, installation)
    lineage = {one.path for one in definitions.list_lineage(served.found)}
    yield _check_eagle3(served, "SupportsEagle3" in lineage, facts, installation)


def _check_embedding(served: Served, installation: Installation) -> Line:
    definitions = installation.definitions
    protocol = f"{_INTERFACES_BASE}:VllmModel"
    wanted = next((one for one in _EMBEDDING_METHODS if definitions.find(f"{protocol}.{one}").is_there), None)
    subject = "embedding method"
    classes = [served.found] + ([served.decoder.inner] if isinstance(served.decoder, Decoder) else [])
    having = {one.path: [name for name in _EMBEDDING_METHODS if find_method(definitions, one, name)] for one in classes}
    found = "; ".join(f"{name} has {', '.join(names) or 'none'}" for name, names in having.items())
    if wanted is None:
        # This vLLM asks for no name; it calls the old one where it embeds before the model runs.
        expected, wanted = f"{_EMBEDDING_METHODS[1]}, as releases before 0.12 call it", _EMBEDDING_METHODS[1]
        verdict: Verdict = "ok" if wanted in having[served.found.path] else "warning"
        return Line(subject, verdict, expected, found)
    expected = f"{wanted}, as this vLLM calls it"
    if wanted in having[served.found.path]:
        return Line(subject, "ok", expected, found)
    return Line(subject, "fails", expected, found, f"give {served.found.path} a method {wanted}")


def _check_eagle3(served: Served, implements: bool, facts: ModelFacts, installation: Installation) -> Line:
    """Capture does not need the interface; serving a draft with this target does."""
    subject, expected = "EAGLE-3 serving", "vLLM's SupportsEagle3, to serve a draft with this target"
    name = served.found.path
    if not implements:
        advice = "capture and training work all the same; this vLLM cannot serve the draft with this target"
        return Line(subject, "warning", expected, f"{name} does not implement it", advice)
    allowed = _read_allowed_types(installation)
    if allowed is not None and not any(one in facts.model_type for one in allowed):
        advice = "this vLLM refuses a draft for other types of model; a later one does not ask"
        found = f"{name} implements it; model_type {facts.model_type!r} is not among {', '.join(allowed)}"
        return Line(subject, "warning", expected, found, advice)
    return Line(subject, "ok", expected, f"{name} implements it")


def _read_allowed_types(installation: Installation) -> list[str] | None:
    """The model types that releases before 0.22 serve an EAGLE-3 draft for; None where they do not ask."""
    for statement in installation.definitions.read_module(_SPECULATIVE_CONFIG):
        for node in ast.walk(statement):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.List):
                continue
            if ast.unparse(node.targets[0]) in _ALLOWED_TYPES:
                return [str(one.value) for one in node.value.elts if isinstance(one, ast.Constant)]
    return None


def _describe_unknown(facts: ModelFacts, registry: Registry, installation: Installation) -> Line:
    subject, expected = "architecture", f"an architecture of {MODULE}"
    name = facts.architectures[0]
    if name in registry.previous:
        found = f"{name}, which vLLM had until {registry.previous[name]}"
        return Line(subject, "fails", expected, found, "use a vLLM that has it")
    if name in registry.elsewhere:
        return Line(
            subject, "fails", expected, f"{name}, which is a plug-in's now", f"install {registry.elsewhere[name]}"
        )
    plugins = _list_plugins(installation)
    if plugins:
        found = f"{name}, unknown to vLLM; not read: whether the plug-ins {', '.join(plugins)} register it"
        return Line(subject, "warning", expected, found, "see that one of them does")
    if facts.config.get("auto_map"):
        found = f"{name}, unknown to vLLM; config.json brings code of its own (auto_map), which is not read"
        return Line(
            subject, "warning", expected, found, "vLLM may serve it with --trust-remote-code, through transformers"
        )
    if name in read_causal_names(installation.source.where).values():
        found = (
            f"{name}, unknown to vLLM and known to transformers; not read: whether the Transformers backend takes it"
        )
        return Line(subject, "warning", expected, found, _TRY_FIRST)
    near = difflib.get_close_matches(name, registry.entries, n=3, cutoff=0.6)
    advice = f"did you mean {' or '.join(near)}?" if near else "use a vLLM, or a plug-in, that has it"
    return Line(subject, "fails", expected, f"{name}, unknown to this vLLM", advice)


def _list_plugins(installation: Installation) -> list[str]:
    """The plug-ins that are neither vLLM's own nor ours; such a one may register architectures."""
    own = installation.source.distribution.partition(" ")[0]
    found = metadata.entry_points(group="vllm.general_plugins")
    return [one.name for one in found if one.name != PLUGIN_NAME and one.dist and one.dist.name != own]


def _find_by_type(facts: ModelFacts, installation: Installation) -> str | None:
    """The text model's architecture where its configuration names a type only, if this vLLM asks transformers then."""
    if not facts.text_key or "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES" not in installation.source.files.get(
        "vllm/config/vllm.py", ""
    ):
        return None
    return read_causal_names(installation.source.where).get(facts.model_type)


def _show(found: Found, installation: Installation) -> str:
    assert isinstance(found.binding, ast.ClassDef)
    return f"{found.path} at {installation.definitions.place(found.module, found.binding)}"
