"""The API server answers a request that died with its engine with the error's text.

Why: through 0.17 the response to such a request is an empty 500. What it does not change: the status, and what the
server does when its engine is dead; responses that have a body.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def add_and_tell(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        wrapped(*args, **kwargs)
        handlers = (kwargs["app"] if "app" in kwargs else args[0]).exception_handlers
        for kind in (EngineDeadError, EngineGenerateError, RuntimeError):
            handlers[kind] = _tell(handlers[kind])

    return wrapt.FunctionWrapper(original, add_and_tell)


def _tell(handle: Any) -> Any:
    async def handle_and_tell(request: Any, error: Exception) -> Any:
        from fastapi.responses import JSONResponse

        response = await handle(request, error)
        if response.body:
            return response
        # EngineGenerateError has no text of its own.
        first = error if str(error) else error.__cause__ or error
        message = f"{type(first).__name__}: {first}"
        facts = {"message": message, "type": "InternalServerError", "param": None, "code": response.status_code}
        return JSONResponse({"error": facts}, status_code=response.status_code)

    return handle_and_tell


def verify() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    kinds = (EngineDeadError, EngineGenerateError)
    if not all(issubclass(kind, Exception) for kind in kinds):
        raise RuntimeError(f"expected exceptions, found {kinds}")


PATCH = Patch(
    name="answer_with_engine_errors",
    targets=("{LAUNCHER}:_add_shutdown_handlers",),
    # Newer releases answer with the text themselves.
    vllm="<0.18",
    # Engines without a server do not import it.
    process="any",
    relies_on={"{LAUNCHER}:_add_shutdown_handlers": ("app",)},
    upstream="done in 0.18: the handlers answer in JSON",
    remove_when="0.17 is not supported any more",
    build=build,
    verify=verify,
)
