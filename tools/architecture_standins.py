"""What vLLM has no code for on a CPU, in plain torch, so that a model that needs it can be run here at all.

Each stands for kernels of a GPU and is no part of the overlay. Whether one is right, transformers' own forward says.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any


def stand_in(architecture: str) -> str:
    """Put into vLLM what this architecture needs, and say what that was; empty if nothing."""
    _hide_numba()
    # vLLM 0.16 has these models elsewhere, and other kernels.
    if architecture not in STAND_INS or importlib.util.find_spec("vllm.models") is None:
        return ""
    said, install = STAND_INS[architecture]
    install()
    return said


def _hide_numba() -> None:
    """From 0.31 on vLLM asks every value in every module for its `__dict__`, and dies of numba's library, which answers
    any name with a function. Kimi-K2.5's code imports numba.
    """
    importlib.import_module("llvmlite.binding")
    sys.modules.pop("llvmlite.binding.ffi")


def _install_delta_attention() -> None:
    _install_small_blocks()
    _install_latent_attention()
    from vllm.model_executor.layers import utils as layers
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn
    from vllm.models.kimi_k3.nvidia import model
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda

    dispatch = layers.dispatch_cpu_unquantized_gemm
    # Kimi Linear's latent attention takes a projection apart that vLLM on a CPU has packed and thrown away by then.
    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: dispatch(layer, remove_weight=False)
    # Asks for a package of CUDA to find that there is no second GPU.
    model.maybe_init_gemm_rs_ar = lambda *_: None
    kda.chunk_kda_with_fused_gate = run_delta_attention
    kda.fused_recurrent_kda_packed_decode = decode_delta_attention
    kimi_gdn_linear_attn.gather_initial_states = gather_states


def _install_small_blocks() -> None:
    """A model with latent attention and states gets blocks of 128 tokens, for kernels of a GPU; vLLM's latent attention
    on a CPU takes 16, which a tiny state fits into.
    """
    from vllm.platforms.cpu import CpuPlatform

    def pad_states(config: Any, backend: Any) -> None:
        token = config.model_config.get_head_size() * config.model_config.dtype.itemsize
        config.cache_config.mamba_page_size_padded = config.cache_config.block_size * token

    CpuPlatform._align_hybrid_block_size = staticmethod(pad_states)


def _install_latent_attention() -> None:
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    MultiHeadLatentAttention._forward_prefill_fused = attend_to_latents
    MultiHeadLatentAttention._decode_concat_cache = keep_latents


def attend_to_latents(
    layer: Any, q: Any, latent: Any, k_rope: Any, positions: Any, cos_sin: Any, slots: Any, metadata: Any, out: Any
) -> None:
    """Causal attention of whole prompts, and their latents into the cache; `q` is `[tokens, heads, width]`."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    assert positions is None
    assert metadata.prefill.chunked_context is None
    _keep(layer, latent, k_rope, slots)
    both = layer.kv_b_proj(latent)[0].view(len(q), layer.num_local_heads, -1)
    k, v = both.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
    k = torch.cat([k, k_rope.view(len(q), 1, -1).expand(-1, layer.num_local_heads, -1)], dim=-1)
    starts = metadata.prefill.query_start_loc.tolist()
    for begin, end in pairwise(starts):
        own_q, own_k, own_v = (x[begin:end].transpose(0, 1) for x in (q, k, v))  # [heads, tokens, width]
        read = scaled_dot_product_attention(own_q, own_k, own_v, is_causal=True, scale=layer.scale)
        out[begin:end] = read.transpose(0, 1).flatten(1)


def keep_latents(
    layer: Any, q_latent: Any, q_rope: Any, latent: Any, k_rope: Any, positions: Any, cos_sin: Any, slots: Any
) -> Any:
    """One token of each sequence: its latent into the cache, and the query that reads latents."""
    import torch

    assert positions is None
    _keep(layer, latent, k_rope, slots)
    return torch.cat([q_latent, q_rope], dim=-1)


def _keep(layer: Any, latent: Any, k_rope: Any, slots: Any) -> None:
    import torch

    cache = layer.kv_cache.view(-1, layer.kv_cache.shape[-1])  # [slots, latent + rope]
    cache[slots] = torch.cat([latent, k_rope.view(len(latent), -1)], dim=-1)


def gather_states(states: Any, indices: Any, has_state: Any) -> Any:
    """Of `states` `[cache, ...]` the rows of `indices`, zero where a sequence has none yet."""
    rows = states[indices.long()]
    rows[~has_state] = 0
    return rows


def run_delta_attention(
    q: Any,
    k: Any,
    v: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    g_bias: Any,
    lower_bound: float | None,
    initial_state: Any,
    cu_seqlens: Any,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Any, Any]:
    """Kimi's delta attention over whole sequences, one behind the other in `cu_seqlens`.

    q, k, v and raw_g are `[1, tokens, heads, width]`, raw_beta is `[1, tokens, heads]`, the states are `[sequences,
    heads, width, width]`. Returns what q reads, in v's shape and dtype, and the last states.
    """
    import torch

    assert output_final_state
    assert use_qk_l2norm_in_kernel
    out, states = torch.empty_like(v), torch.empty_like(initial_state)
    for number, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        part = slice(begin, end)
        decay = _decay(raw_g[0, part], A_log, g_bias, lower_bound)
        out[0, part], states[number] = _recur(
            q[0, part], k[0, part], v[0, part], decay, raw_beta[0, part], initial_state[number]
        )
    return out, states


def decode_delta_attention(
    mixed_qkv: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: float | None,
    initial_state: Any,
    state_indices: Any,
) -> tuple[Any, Any]:
    """One token of each sequence: `mixed_qkv` is `[sequences, 3 x heads x width]`, the states are changed in place."""
    import torch

    heads, width = raw_g.shape[2:]
    q, k, v = mixed_qkv.view(-1, 3, heads, width).unbind(1)  # [sequences, heads, width]
    decay = _decay(raw_g[0], A_log, dt_bias, lower_bound)
    out = torch.zeros(1, *v.shape, dtype=v.dtype)
    for number, place in enumerate(state_indices.tolist()):
        one = slice(number, number + 1)
        out[0, one], initial_state[place] = _recur(
            q[one], k[one], v[one], decay[one], raw_beta[0, one], initial_state[place]
        )
    return out, initial_state


def _decay(raw_g: Any, a_log: Any, bias: Any, lower_bound: float | None) -> Any:
    """What is left of a state after a token, by head and width of the keys: `[tokens, heads, width]`."""
    from torch.nn.functional import softplus

    gate = raw_g.float() + bias.float().view(raw_g.shape[1:])
    rate = a_log.float().exp()[:, None]
    return (-rate * softplus(gate) if lower_bound is None else lower_bound * (rate * gate).sigmoid()).exp()


def _recur(q: Any, k: Any, v: Any, decay: Any, raw_beta: Any, state: Any) -> tuple[Any, Any]:
    """Token after token of one sequence (Kimi Linear, arXiv 2510.26692): forget, correct what k reads, read with q."""
    import torch

    q, k = (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    beta = raw_beta.float().sigmoid()[..., None]
    state = state.float()  # [heads, values, keys]
    read = []
    for token in range(len(q)):
        state = state * decay[token][:, None, :]
        missing = (v[token].float() - (state @ k[token][..., None]).squeeze(-1)) * beta[token]
        state = state + missing[..., None] * k[token][:, None, :]
        read.append((state @ q[token][..., None]).squeeze(-1))
    return torch.stack(read).to(v.dtype), state


# What is said of a row, and what puts it in.
STAND_INS: Mapping[str, tuple[str, Callable[[], None]]] = {
    "KimiLinearForCausalLM": (
        "delta and latent attention in plain torch, for kernels that vLLM has for a GPU",
        _install_delta_attention,
    ),
}
