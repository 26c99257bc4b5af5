"""Decoder layers read from small models of every form; nothing is imported."""

from __future__ import annotations

import textwrap

import pytest

from vllm_overlay.source.decoder import Decoder, LayerClass, LoopCall, Unread, bind_call, find_decoder
from vllm_overlay.source.definitions import Definitions
from vllm_overlay.source.registry import MODULE, Registry, read_registry
from vllm_overlay.source.signatures import list_parameters
from vllm_overlay.source.vllm_source import SourceError, VllmSource

MODELS = "vllm/model_executor/models"

LAYERS = """
class Layer:
    def forward(self, positions, hidden_states, residual=None):
        return hidden_states, residual

class Other(Layer):
    def forward(self, hidden_states, **kwargs):
        if kwargs:
            return hidden_states
        return hidden_states, None

KINDS = {"attention": Layer, "mamba": Other}
"""

LLAMA = """
from vllm.model_executor.models.layers import Layer
from vllm.model_executor.models.utils import make_layers

class Model:
    def __init__(self, *, vllm_config, layer_type: type = Layer):
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers, lambda prefix: layer_type(prefix=prefix), prefix="x"
        )

    def forward(self, positions, **extra):
        for i, layer in enumerate(islice(self.layers, 0, 4)):
            hidden_states, residual = layer(positions, hidden_states, residual, **extra)

class ForCausalLM:
    def __init__(self, *, vllm_config, layer_type: type = Layer):
        self.model = self._init_model(layer_type=layer_type)

    def _init_model(self, layer_type: type = Layer):
        return Model(vllm_config=1, layer_type=layer_type)
"""


def open_models(platform: str = "", **files: str) -> Definitions:
    texts = {f"{MODELS}/layers.py": LAYERS, f"{MODELS}/llama.py": LLAMA}
    texts |= {f"{MODELS}/{name.replace('__', '/')}.py": textwrap.dedent(text) for name, text in files.items()}
    texts |= {"vllm/__init__.py": "", f"{MODELS}/__init__.py": ""}
    return Definitions(VllmSource("memory", "1.0.0", "none", texts), platform)


REGISTRY = """
_TEXT_GENERATION_MODELS = {
    "LlamaForCausalLM": ("llama", "ForCausalLM"),
    "Far": ("vllm.models.far", "Model"),
}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS}
_PREVIOUSLY_SUPPORTED_MODELS = {"Old": "0.9.2"}
_OOT_SUPPORTED_MODELS = {"Bart": "https://example.org"}
"""


def decoder_of(module: str, name: str, definitions: Definitions, text_architecture: str | None = None) -> Decoder:
    found = definitions.find_class(f"vllm.model_executor.models.{module}", name)
    assert found is not None
    decoder = find_decoder(definitions, read_registry(definitions), found, text_architecture)
    assert isinstance(decoder, Decoder), decoder
    return decoder


def test_the_registry_is_read_whole() -> None:
    registry = read_registry(open_models(registry=REGISTRY))
    assert registry.entries["LlamaForCausalLM"].module == "vllm.model_executor.models.llama"
    assert registry.entries["Far"].module == "vllm.models.far"
    assert registry.entries["Far"].table == "_TEXT_GENERATION_MODELS"
    assert (registry.previous, registry.elsewhere) == ({"Old": "0.9.2"}, {"Bart": "https://example.org"})


def test_a_vllm_without_tables_is_an_error() -> None:
    with pytest.raises(SourceError, match=f"expected tables of architectures in {MODULE}, found none"):
        read_registry(open_models())


def test_a_subclass_that_gives_its_own_layer() -> None:
    glm = """
    from vllm.model_executor.models.llama import ForCausalLM
    from vllm.model_executor.models.layers import Other

    class GlmForCausalLM(ForCausalLM):
        def __init__(self, *, vllm_config):
            super().__init__(vllm_config=vllm_config, layer_type=Other)
    """
    decoder = decoder_of("glm", "GlmForCausalLM", open_models(registry=REGISTRY, glm=glm))
    assert (decoder.path, decoder.inner.path) == ("model.layers", "Model")
    assert [kind.name for kind in decoder.kinds] == ["Other"]
    assert decoder.kinds[0].signature == "(hidden_states, **kwargs)"
    assert decoder.kinds[0].returns == ""
    plain = decoder_of("llama", "ForCausalLM", open_models(registry=REGISTRY))
    assert [(kind.name, kind.returns) for kind in plain.kinds] == [("Layer", "(hidden_states, residual)")]
    (call,) = plain.calls
    assert call.text == "layer(positions, hidden_states, residual, **extra)"
    assert (call.result, call.style, call.has_stars) == ("hidden_states, residual", "by position", True)


def test_a_wrapper_builds_its_text_model_by_architecture() -> None:
    wrapper = """
    class Named:
        def __init__(self, *, vllm_config):
            self.vision_tower = Tower()
            with self._mark_language_model(vllm_config):
                self.language_model = init_vllm_registered_model(
                    vllm_config=vllm_config, hf_config=config.text_config, architectures=["LlamaForCausalLM"]
                )

    class OfConfig:
        def __init__(self, *, vllm_config):
            self.language_model = init_vllm_registered_model(vllm_config=vllm_config, hf_config=config.text_config)

    class Tower:
        def __init__(self):
            self.layers = make_layers(4, lambda prefix: Tower())
    """
    definitions = open_models(registry=REGISTRY, wrapper=wrapper)
    decoder = decoder_of("wrapper", "Named", definitions)
    assert decoder.path == "language_model.model.layers"
    assert [name.rpartition(":")[2] for name in decoder.through] == ["Named", "ForCausalLM", "Model"]
    assert decoder_of("wrapper", "OfConfig", definitions, "LlamaForCausalLM").path == decoder.path
    found = definitions.find_class("vllm.model_executor.models.wrapper", "OfConfig")
    assert found is not None
    for architecture, reason in ((None, "config.json does not name them"), ("No", "which this vLLM does not have")):
        unread = find_decoder(definitions, read_registry(definitions), found, architecture)
        assert isinstance(unread, Unread)
        assert reason in unread.reasons[0]


def test_a_hybrid_looks_its_layers_up_in_a_table() -> None:
    hybrid = """
    from vllm.model_executor.models.layers import KINDS

    class Model:
        def __init__(self, *, vllm_config):
            def get_layer(prefix):
                layer_class = KINDS[config.layer_types[0]]
                return layer_class(prefix=prefix)

            self.start_layer, self.end_layer, self.layers = make_layers(4, get_layer, prefix="x")

        def forward(self, positions):
            for index in range(self.start_layer, self.end_layer):
                layer = self.layers[index]
                hidden_states = layer(positions=positions, hidden_states=hidden_states)
    """
    decoder = decoder_of("hybrid", "Model", open_models(registry=REGISTRY, hybrid=hybrid))
    assert [kind.name for kind in decoder.kinds] == ["Layer", "Other"]
    assert [call.style for call in decoder.calls] == ["by keyword"]


def test_layers_in_a_list_made_by_a_method_and_a_loop_in_the_base() -> None:
    listed = """
    from vllm.model_executor.models.layers import Layer as BaseLayer

    class ListLayer(BaseLayer):
        pass

    class Base:
        def __init__(self):
            self._init_layers(config)

        def _init_layers(self, config):
            self.blocks = nn.ModuleList([ListLayer(i) for i in range(config.num_hidden_layers)])

        def forward(self, hidden_states):
            for block in self.blocks:
                hidden_states = block(hidden_states)

    class Model(Base):
        def forward(self, hidden_states):
            return super().forward(hidden_states)
    """
    decoder = decoder_of("listed", "Model", open_models(registry=REGISTRY, listed=listed))
    assert (decoder.path, decoder.kinds[0].name, decoder.calls[0].text) == (
        "blocks",
        "ListLayer",
        "layer(hidden_states)",
    )


def test_what_cannot_be_read_is_said() -> None:
    odd = """
    class Model:
        def __init__(self):
            self.layers = make_layers(4, find_maker(config))

    class Nothing:
        def __init__(self):
            self.size = 4
    """
    definitions = open_models(registry=REGISTRY, odd=odd)
    decoder = decoder_of("odd", "Model", definitions)
    assert decoder.kinds == ()
    assert decoder.unread[0].startswith("the class of layers at vllm/model_executor/models/odd.py:")
    assert decoder.unread[1].startswith("how vllm.model_executor.models.odd:Model calls its layers")
    nothing = definitions.find_class("vllm.model_executor.models.odd", "Nothing")
    assert nothing is not None
    unread = find_decoder(definitions, Registry({}, {}, {}), nothing, None)
    assert unread == Unread(("no list of decoder layers in what vllm.model_executor.models.odd:Nothing builds",))


BY_PLATFORM = """
if TYPE_CHECKING:
    from .never import Model
elif current_platform.device_type == "tpu":
    pass
elif current_platform.is_rocm() or current_platform.is_xpu():
    from .far_amd import Model
elif not current_platform.is_cpu():
    from .far_cuda import Model
else:
    from .far_cpu import Model
"""


@pytest.mark.parametrize(("platform", "module"), [("rocm", "amd"), ("cuda", "cuda"), ("cpu", "cpu"), ("xpu", "amd")])
def test_a_class_that_depends_on_the_platform(platform: str, module: str) -> None:
    files = {f"far_{one}": "class Model: ...\n" for one in ("amd", "cuda", "cpu")}
    found = open_models(platform, far=BY_PLATFORM, **files).find_class("vllm.model_executor.models.far", "Model")
    assert found is not None
    assert found.module == f"vllm.model_executor.models.far_{module}"


def make_kind(signature: str) -> LayerClass:
    return LayerClass("Layer", "", signature, list_parameters(signature), "", False)


def make_call(*positional: str, keywords: tuple[str, ...] = (), has_stars: bool = False) -> LoopCall:
    return LoopCall("", "", "", positional, keywords, has_stars)


@pytest.mark.parametrize(
    ("call", "signature", "misfits"),
    [
        (make_call("positions", "hidden_states"), "(positions, hidden_states)", []),
        (make_call("positions", "x"), "(positions, hidden_states)", []),
        (make_call("positions", has_stars=True), "(positions, hidden_states)", []),
        (make_call(keywords=("positions", "hidden_states")), "(hidden_states, **kwargs)", []),
        (make_call("a", "b", "c"), "(x, y)", ["3 arguments by position, Layer takes 2"]),
        (make_call("a", keywords=("x",)), "(x)", ["'x' both by position and by keyword"]),
        (make_call("a", keywords=("z",)), "(x)", ["a keyword 'z' that Layer does not take"]),
        (make_call("a"), "(x, y, z=None)", ["no 'y', which Layer requires"]),
        (
            make_call("hidden_states", "positions"),
            "(positions, hidden_states)",
            [
                "'hidden_states' by position where Layer takes 'positions'",
                "'positions' by position where Layer takes 'hidden_states'",
            ],
        ),
    ],
)
def test_a_call_is_bound_to_the_layer(call: LoopCall, signature: str, misfits: list[str]) -> None:
    assert bind_call(call, make_kind(signature)) == misfits
