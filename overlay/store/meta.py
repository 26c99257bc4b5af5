"""What is true of every row of a store, written once when the store is made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from vllm_overlay.store import float8
from vllm_overlay.store.errors import StoreError

# The names that the safetensors format has for the dtypes that a store can hold; float8's rows are packed bytes.
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", float8.DTYPE: "U8"}

# vllm_version, runner and model may differ between the writers of one store; the first writer's are kept.
SAME_IN_EVERY_WRITER = ("layer_ids", "hidden_size", "dtype", "num_hidden_layers", "model_fingerprint")


@dataclass(frozen=True)
class StoreMeta:
    """Facts about the rows of a store.

    layer_ids: the columns of a row, in the order asked for; 0 is the embedding output, k the residual stream after k
    decoder layers. hidden_size: width of the residual stream. dtype: "float32", "bfloat16", "float16", or
    "float8_e4m3fn" with a scale for each row (see float8.py). num_hidden_layers: decoder layers of the target. model:
    the target as the user named it. model_fingerprint: what tells its weights and configuration from another's.
    vllm_version, runner ("V1" or "V2"): what made the rows.

    Raises StoreError if the layer ids are empty, repeated or outside 0..num_hidden_layers, or if the size or the dtype
    is not a possible one.
    """

    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    num_hidden_layers: int
    model: str
    model_fingerprint: str
    vllm_version: str
    runner: str

    def __post_init__(self) -> None:
        if not self.layer_ids or len(set(self.layer_ids)) != len(self.layer_ids):
            raise StoreError(f"layer ids must be one or more different numbers, not {list(self.layer_ids)}")
        outside = [layer for layer in self.layer_ids if not 0 <= layer <= self.num_hidden_layers]
        if outside:
            raise StoreError(f"layer ids {outside} are outside 0..{self.num_hidden_layers}, the layers of this target")
        if self.hidden_size < 1:
            raise StoreError(f"hidden size must be at least 1, not {self.hidden_size}")
        if self.dtype not in SAFETENSORS_DTYPES:
            raise StoreError(f"a store holds {', '.join(SAFETENSORS_DTYPES)}, not {self.dtype!r}")

    @property
    def is_packed(self) -> bool:
        """Whether the files hold packed rows, as float8.py says."""
        return self.dtype == float8.DTYPE

    @property
    def torch_dtype(self) -> torch.dtype:
        """In which rows are read."""
        return torch.bfloat16 if self.is_packed else self.stored_dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """In which rows are written and lie in the files."""
        dtype = torch.uint8 if self.is_packed else getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def row_shape(self) -> tuple[int, int]:
        """(layers, hidden): a token's rows as they are read."""
        return len(self.layer_ids), self.hidden_size

    @property
    def stored_shape(self) -> tuple[int, int]:
        """A token's rows as they lie in the files: (layers, hidden), or of packed ones (layers, hidden + 4)."""
        return len(self.layer_ids), self.hidden_size + (float8.SCALE_BYTES if self.is_packed else 0)

    @property
    def row_bytes(self) -> int:
        """Of a token, in the files."""
        layers, width = self.stored_shape
        return layers * width * self.stored_dtype.itemsize

    def narrow(self, columns: Sequence[int]) -> StoreMeta:
        """The same with these columns of a row only, in this order."""
        return replace(self, layer_ids=tuple(self.layer_ids[column] for column in columns))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StoreMeta:
        facts = json.loads(text)
        return cls(**{**facts, "layer_ids": tuple(facts["layer_ids"])})

    def misfits(self, found: StoreMeta) -> list[str]:
        """How `found` differs from these facts in what all rows of one store must share: one phrase a fact."""
        return [
            f"{name}: expected {getattr(self, name)}, found {getattr(found, name)}"
            for name in SAME_IN_EVERY_WRITER
            if getattr(self, name) != getattr(found, name)
        ]
