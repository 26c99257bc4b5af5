"""The store: a log of hidden-state rows and an index of records, in one folder. Here live its files' layout, its writer
and its reader.

Nothing here may import vllm, the patches or the capture worker: the training side reads a store where vLLM is not
installed.

    STORE/index.sqlite                       one row per record (see index.py; for pipeline stages also parts.py)
    STORE/shards/<log>-<shard>.safetensors   rows [rows, layers, hidden] (see shard.py)
    STORE/shards/<log>.lock                  held by the log's writer while it lives (see log.py)
    STORE/store.lock                         held while a writer opens or closes
    STORE/replica-<name>/                    a store by itself, of one replica of several (see joined.py)

A store that is closed may be copied anywhere, and be read there through fsspec (see remote.py). Until then it lives on
a filesystem of one machine: SQLite's write-ahead log needs shared memory between its processes.
"""

from __future__ import annotations

from vllm_overlay.store.errors import IncompleteRecordError, StoreError
from vllm_overlay.store.float8 import pack_rows
from vllm_overlay.store.joined import REPLICA_PREFIX, JoinedStore, find_stores, is_store
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.parts import Part
from vllm_overlay.store.reader import Damage, Record, Store
from vllm_overlay.store.summary import LayerNorms, StoreSummary, measure_norms, summarize
from vllm_overlay.store.writer import PendingRecord, StoreWriter

__all__ = [
    "REPLICA_PREFIX",
    "Damage",
    "IncompleteRecordError",
    "JoinedStore",
    "LayerNorms",
    "Part",
    "PendingRecord",
    "Record",
    "Store",
    "StoreError",
    "StoreMeta",
    "StoreSummary",
    "StoreWriter",
    "find_stores",
    "is_store",
    "measure_norms",
    "pack_rows",
    "summarize",
]
