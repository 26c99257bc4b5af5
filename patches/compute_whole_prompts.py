"""speculators 0.3's scheduler computes every prompt to its end, and its workers hear of every request that ended.

Why: its loop aborts each request of a step, also one of whose prompt only a chunk was computed, and ends with a step
that is scheduled and never executed, which takes the ids of the last requests with it: workers would keep them for
ever. What it does not change: when a request is scheduled, and requests whose prompt was computed end where they did.
A prompt that finds no room in the KV cache is an error in place of a short result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import wrapt

from vllm_overlay.errors import OverlayError
from vllm_overlay.patch import Patch

SCHEDULER = "speculators.data_generation.vllm_hidden_states_generator:Scheduler"


class WholePrompts:
    """A scheduler as the generator uses it; everything else is the scheduler's own."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's. Errors: OverlayError when nothing more can be scheduled and a prompt is not computed."""
        output = self._scheduler.schedule(*args, **kwargs)
        if not output.total_num_scheduled_tokens:
            # The caller does not execute this step: what it would have told the workers goes with the next one.
            self._scheduler.finished_req_ids.update(output.finished_req_ids)
            self._refuse_unfinished()
        return output

    def finish_requests(self, request_ids: str | Iterable[str], finished_status: Any) -> Any:
        """As vLLM's, but for requests whose prompt is still being computed: those go on."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        return self._scheduler.finish_requests([one for one in ids if not self._is_under_way(one)], finished_status)

    def _is_under_way(self, request_id: str) -> bool:
        request = self._scheduler.requests.get(request_id)
        return request is not None and request.num_computed_tokens < request.num_prompt_tokens

    def _refuse_unfinished(self) -> None:
        from vllm.v1.request import RequestStatus

        left = list(self._scheduler.requests.values())
        if not left:
            return
        self._scheduler.finish_requests([request.request_id for request in left], RequestStatus.FINISHED_ABORTED)
        raise OverlayError(
            f"request {left[0].request_id!r}: its prompt of {left[0].num_prompt_tokens} tokens finds no room in a KV "
            f"cache of {self._scheduler.cache_config.num_gpu_blocks} blocks; give it more (gpu_memory_utilization)"
        )


def build(original: Any) -> Any:
    def make(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> WholePrompts:
        return WholePrompts(wrapped(*args, **kwargs))

    return wrapt.FunctionWrapper(original, make)


def verify() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    missing = [name for name in ("schedule", "finish_requests") if name not in vars(Scheduler)]
    if missing:
        raise RuntimeError(f"expected vLLM's Scheduler with {', '.join(missing)}")


PATCH = Patch(
    name="compute_whole_prompts",
    targets=(SCHEDULER,),
    vllm=">=0.11",
    process="any",
    relies_on={},
    upstream="speculators 0.4 counts what was computed of each prompt; 0.5 takes states from vLLM's own connector",
    remove_when="nobody runs speculators 0.3 any more",
    build=build,
    verify=verify,
    package="speculators==0.3.*",
)
