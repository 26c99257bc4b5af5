"""Where a draft starts: from the target's own last layer and head, or at random."""

from __future__ import annotations

import torch

from vllm_overlay.eagle3.draft import NUM_FEATURES, Draft, DraftConfig
from vllm_overlay.eagle3.target import Target, TargetConfig, load_layer
from vllm_overlay.eagle3.vocabulary import DraftVocabulary
from vllm_overlay.errors import OverlayError

STANDARD_DEVIATION = 0.02


def draft_config(
    target: TargetConfig,
    layer_ids: tuple[int, ...],
    draft_vocab_size: int,
    *,
    hidden_size: int | None = None,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    style: str = "llama",
) -> DraftConfig:
    """A draft layer of the target's shape, or of the same heads scaled to another `hidden_size`.

    Raises OverlayError: a hidden size that holds no whole number of heads.
    """
    size = hidden_size or target.hidden_size
    heads, kv_heads, intermediate = target.num_attention_heads, target.num_key_value_heads, target.intermediate_size
    if size != target.hidden_size:
        heads = size // target.head_dim
        if heads * target.head_dim != size:
            raise OverlayError(f"--hidden-size {size}: must be a multiple of the target's head size {target.head_dim}")
        kv_heads = max(n for n in range(1, min(heads, kv_heads) + 1) if heads % n == 0)
        intermediate = max(1, round(intermediate * size / target.hidden_size))
    return DraftConfig(
        hidden_size=size,
        target_hidden_size=target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=target.head_dim,
        intermediate_size=intermediate,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        norm_before_residual=norm_before_residual,
        layer_ids=layer_ids,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
        style=style,
    )


def create_draft(config: DraftConfig, target: Target, vocabulary: DraftVocabulary, how: str, seed: int) -> Draft:
    """A new float32 draft on the CPU. `how`: "target" (see `copy_target`) or "random"; random parts follow `seed`."""
    draft = Draft(config, None if config.has_own_embeddings else target.embed_tokens)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=STANDARD_DEVIATION, generator=generator)
    if how == "target":
        copy_target(draft, target, vocabulary)
    return draft


@torch.no_grad()
def copy_target(draft: Draft, target: Target, vocabulary: DraftVocabulary) -> None:
    """Start as the target's last decoder layer and head, reading the deepest feature; other shapes stay random.

    `fc` passes the deepest feature on; the columns of q, k and v that read features are the last layer's, those that
    read embeddings stay small and random (at zero they would have no way in at first).
    """
    size = draft.config.hidden_size
    if size == draft.config.target_hidden_size:
        draft.lm_head.weight.copy_(target.lm_head[vocabulary.ids])
        draft.norm.weight.copy_(target.final_norm)
        draft.fc.weight.zero_()
        draft.fc.weight[:, (NUM_FEATURES - 1) * size :] = torch.eye(size)

    layer = load_layer(target.path, target.config.num_hidden_layers - 1)
    parameters = dict(draft.midlayer.named_parameters())
    if "input_layernorm.weight" in layer:
        layer["hidden_norm.weight"] = layer.pop("input_layernorm.weight")
    for name, tensor in layer.items():
        parameter = parameters.get(name)
        if parameter is None or not tensor.is_floating_point():
            continue
        if name.startswith(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")):
            if tensor.shape == (parameter.shape[0], size):
                parameter[:, size:] = tensor
        elif tensor.shape == parameter.shape:
            parameter.copy_(tensor)
