"""The API server's own handlers, on an application whose requests fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_overlay.patches.answer_with_engine_errors import PATCH, _tell


@pytest.fixture
def app(request: pytest.FixtureRequest) -> Any:
    """An application with vLLM's handlers, of a release that answers with nothing."""
    import vllm

    from vllm_overlay.compat.releases import is_needed, resolve_release

    release = resolve_release(vllm.__version__, policy="strict", stands_for=None)
    if not is_needed(PATCH.vllm, release):
        pytest.skip(f"vLLM {release} answers with the text itself")
    from fastapi import FastAPI
    from vllm.entrypoints import launcher

    request.getfixturevalue("apply")(PATCH)
    app = FastAPI()
    app.state.engine_client = SimpleNamespace(errored=True, is_running=False)
    launcher._add_shutdown_handlers(app, SimpleNamespace(should_exit=False))
    return app


def ask(app: Any, error: Exception) -> Any:
    from fastapi.testclient import TestClient

    @app.get("/")  # type: ignore[misc]
    def fail() -> None:
        raise error

    return TestClient(app, raise_server_exceptions=False).get("/")


def test_a_dead_engine(app: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    response = ask(app, EngineDeadError())
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert message.startswith("EngineDeadError: EngineCore encountered an issue.")


def test_an_error_without_a_text_of_its_own(app: Any) -> None:
    from vllm.v1.engine.exceptions import EngineGenerateError

    error = EngineGenerateError()
    error.__cause__ = KeyError("boom-17")
    assert ask(app, error).json()["error"]["message"] == "KeyError: 'boom-17'"


def test_a_body_is_left_alone() -> None:
    from fastapi.responses import JSONResponse

    stock = JSONResponse({"stock": True}, status_code=503)

    async def handle(request: Any, error: Exception) -> Any:
        return stock

    assert asyncio.run(_tell(handle)(None, RuntimeError("boom-17"))) is stock
