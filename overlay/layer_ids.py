"""Which layers are captured: from what a user writes to ids of a target with N layers. Needs no torch.

Id 0 is the embedding output, id k the residual stream after k decoder layers, id N the stream before the final norm.
"""

from __future__ import annotations

import itertools

from vllm_overlay.errors import OverlayError
from vllm_overlay.settings import parse_layers


class LayerIdsError(OverlayError):
    """The target has no such layers."""


def resolve_layer_ids(layers: str, num_hidden_layers: int) -> tuple[int, ...]:
    """Ids from `eagle3`, `all` or a list, for a target of N layers, in the order of the columns.

    Errors: LayerIdsError for an id above N, or when N is too small for the EAGLE-3 default; SettingsError when the text
    is none of the three.
    """
    last = num_hidden_layers
    wanted = parse_layers(layers)
    if wanted == "all":
        return tuple(range(last + 1))
    if isinstance(wanted, str):
        ids = (2, last // 2, last - 3, last)
        if not all(a < b for a, b in itertools.pairwise(ids)):
            raise LayerIdsError(
                f"the EAGLE-3 default takes layers 2, N//2, N-3 and N, which for this model's N={last} are "
                f"{', '.join(map(str, ids))}: too shallow; name the layers you want"
            )
        return ids
    above = [layer_id for layer_id in wanted if layer_id > last]
    if above:
        raise LayerIdsError(
            f"layer ids {above} do not exist: this model has ids 0 to {last} (the last before the final norm)"
        )
    return wanted
