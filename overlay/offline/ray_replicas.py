"""A dataset over N replicas by Ray Data: each is an actor that holds an engine and takes batch after batch.

`Dataset.map_batches` with an actor class is Ray's documented way for offline inference with state. Not `ray.data.llm`:
its engine stage gives every replica the same environment, and thus the same store, which replicas on several machines
must not share; and each Ray release names one vLLM release that it goes with (Ray 2.60 pins 0.29.0).

Ray starts a lost actor again and gives it the batch anew. It has its old name then, so it finds its old stores, one for
each node that it was on, and computes only what is missing there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vllm_overlay.dataset import Dataset, DatasetItem
from vllm_overlay.errors import OverlayError
from vllm_overlay.layer_ids import resolve_layer_ids
from vllm_overlay.model_shape import read_model_shape
from vllm_overlay.offline.capture import (
    CaptureSummary,
    capture_group,
    check_complete,
    check_disk,
    check_lengths,
    count_bytes,
    find_done,
    find_missing,
    switch_on,
)
from vllm_overlay.settings import read_dtype
from vllm_overlay.store import REPLICA_PREFIX, find_stores, is_store

if TYPE_CHECKING:
    from vllm import LLM

BATCHES_PER_REPLICA = 16
"""So many that replicas that are faster take more of them, and a lost one loses little time."""

MOST_ITEMS = 1024


def capture_with_ray(
    dataset: Path, *, model: str, store: Path, layers: str, engine_options: Sequence[str], replicas: int
) -> CaptureSummary:
    """Capture what the store does not hold yet by `replicas` engines on the Ray cluster that there is, or a local one.

    Dataset, model and store are folders that all machines see; each replica writes a store of its own within `store`.
    Errors: OverlayError as for `capture_dataset`, and when Ray is not installed or the cluster has too few GPUs.
    """
    ray = _import_ray()
    items = list(Dataset.open(dataset))
    shape = read_model_shape(model, engine_options)
    layer_ids = resolve_layer_ids(layers, shape.num_hidden_layers)
    wanted = find_missing(items, find_stores(store), model, layer_ids)
    if not wanted:
        return CaptureSummary(0, len(items), 0, 0, 0.0)
    check_disk(store, wanted, shape, len(layer_ids))
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False  # ours counts tokens
    plan = EnginePlan(
        str(dataset.absolute()), model, str(store.absolute()), layers, read_dtype(), tuple(engine_options)
    )
    gpus = count_gpus(engine_options, replicas, ray.cluster_resources())
    started = time.perf_counter()
    try:
        num_bytes = _follow(_spread(ray, _number(items, wanted), plan, replicas, gpus), wanted)
    except ray.exceptions.RayError as error:
        if refusal := find_refusal(str(error)):
            raise OverlayError(f"a replica: {refusal}") from error
        raise
    seconds = time.perf_counter() - started
    check_complete(find_stores(store), wanted)
    num_tokens = sum(len(item.token_ids) for item in wanted)
    return CaptureSummary(len(wanted), len(items) - len(wanted), num_tokens, num_bytes, seconds)


@dataclass(frozen=True)
class EnginePlan:
    """What every replica needs to know; folders as paths that all machines have, and no variable of this one's."""

    dataset: str
    model: str
    store: str
    layers: str
    dtype: str
    engine_options: tuple[str, ...]


class EngineReplica:
    """An actor: an engine with capture on. Called with numbers of items, it answers when their records are on disk."""

    def __init__(self, plan: EnginePlan) -> None:
        import ray

        context = ray.get_runtime_context()
        actor = f"{REPLICA_PREFIX}ray-{context.get_actor_id()}"  # the same after a restart, also on another node
        # Only these: another machine may be writing the others' at this moment.
        mine = [path for path in sorted(Path(plan.store).glob(f"{actor}-*")) if is_store(path)]
        self._dataset = Dataset.open(plan.dataset)
        # Once: to read them for each batch takes longer the more there is, and the GPU waits.
        self._done = find_done(mine, list(self._dataset))
        # A node that Ray gave up may be cut off and not dead, its engine still writing: it keeps its folder for itself.
        self._folder = Path(plan.store) / f"{actor}-{context.get_node_id()}"
        self._llm = self._start_engine(plan)

    def _start_engine(self, plan: EnginePlan) -> LLM:
        switch_on(self._folder, plan.layers, plan.dtype)
        from vllm_overlay.offline.engine import build_engine

        return build_engine(plan.model, plan.engine_options)

    def __call__(self, batch: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """`data`: numbers of items, int64 [items]. Answers with their tokens, and all rows' bytes in the first."""
        items = [self._dataset[int(number)] for number in batch["data"]]
        check_lengths(self._llm, items)
        missing = [item for item in items if item.key not in self._done]
        before = count_bytes(self._llm.collective_rpc("overlay_statistics"))
        if missing:
            capture_group(self._llm, missing)
        after = count_bytes(self._llm.collective_rpc("overlay_flush"))
        self._done |= {item.key for item in missing}
        num_bytes = np.zeros(len(items), dtype=np.int64)
        num_bytes[0] = after - before
        return {"tokens": np.array([len(item.token_ids) for item in items], dtype=np.int64), "bytes": num_bytes}

    def __del__(self) -> None:
        """Ray Data ends an actor by dropping it. An engine that did not start is not there to be ended."""
        from vllm_overlay.offline.engine import shut_down

        if llm := vars(self).pop("_llm", None):
            shut_down(llm)


def _number(items: Sequence[DatasetItem], wanted: Sequence[DatasetItem]) -> NDArray[np.int64]:
    keys = {item.key for item in wanted}
    return np.array([number for number, item in enumerate(items) if item.key in keys], dtype=np.int64)


def _spread(ray: Any, numbers: NDArray[np.int64], plan: EnginePlan, replicas: int, gpus: int) -> Any:
    size = min(MOST_ITEMS, math.ceil(len(numbers) / (BATCHES_PER_REPLICA * replicas)))
    # A block a batch, made here: with as many actors as there are CPUs, none would be left for a task that cuts them.
    batches = np.array_split(numbers, math.ceil(len(numbers) / size))
    return ray.data.from_numpy(batches).map_batches(
        EngineReplica,
        fn_constructor_args=(plan,),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=replicas),
        num_cpus=1,
        num_gpus=gpus,
    )


def _follow(results: Any, wanted: Sequence[DatasetItem]) -> int:
    """Run it all. Returns the bytes of rows."""
    from vllm_overlay.progress import make_bar

    num_bytes = 0
    with make_bar(
        total=sum(len(item.token_ids) for item in wanted), unit="tok", unit_scale=True, desc="capture"
    ) as bar:
        for block in results.iter_batches(batch_size=None, prefetch_batches=0):
            num_bytes += int(block["bytes"].sum())
            bar.set_postfix_str(f"{num_bytes / 1e6:.0f} MB", refresh=False)
            bar.update(int(block["tokens"].sum()))
    return num_bytes


def find_refusal(text: str) -> str | None:
    """What a replica refused in one line: Ray hands on an actor's exception as the text of its traceback. None if
    something else failed."""
    ours = f"{OverlayError.__module__}.{OverlayError.__qualname__}: "
    lines = [line.removeprefix(ours) for line in text.splitlines() if line.startswith(ours)]
    return lines[-1] if lines else None


def _import_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise OverlayError(f"--ray needs Ray Data ({error}): pip install 'vllm-overlay[ray]'") from error
    return ray


def count_gpus(engine_options: Sequence[str], replicas: int, resources: Mapping[str, float]) -> int:
    """GPUs of a replica: one for each of its ranks, or none on a cluster of CPUs.

    Errors: OverlayError when the cluster has fewer than all replicas need: Ray would wait for more without a word.
    """
    there = int(resources.get("GPU", 0))
    if not there:
        return 0
    from vllm_overlay.offline.engine import parse_options

    options = parse_options(engine_options)
    gpus = int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))
    if gpus * replicas > there:
        raise OverlayError(
            f"--ray {replicas}: replicas of {gpus} GPUs each need {gpus * replicas}, and the cluster has {there}"
        )
    return gpus
