"""The HTTP API: OpenAI's routes, tokenize and detokenize, probes, metrics, state."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from epd import __version__
from epd.errors import EpdError, ErrorKind, without_frames
from epd.jobs import Stage
from epd.obs import metrics
from gateway.bodies import BodyReader
from gateway.budget import Hold
from gateway.chat import ChatService
from gateway.completions import CompletionEncoder
from gateway.forms import Form
from gateway.openai import Encoder
from gateway.openapi import OPENAPI
from gateway.outcomes import STAGE, ClientGone, beginning, typed
from gateway.response_encoder import ResponseEncoder
from gateway.responses import Begun, EventStream, read_body, unless_gone
from gateway.retries import retry_headers
from gateway.schema import ChatCall
from gateway.tokens import detokenize, tokenize

_log = logging.getLogger(__name__)
Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(service: ChatService, bodies: BodyReader, fingerprint: str) -> FastAPI:
    """Routes over one service. No state of its own."""
    # No redirects of paths with a slash too many: they would lead clients, and their keys,
    # from https to http where TLS ends before us.
    app = FastAPI(
        title="epd", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_work(app, service, bodies)
    _add_models(app, service, fingerprint)
    _add_state(app, service)
    _add_error_handlers(app)
    return app


def _add_work(app: FastAPI, service: ChatService, bodies: BodyReader) -> None:
    async def chat_completions(request: Request) -> Response:
        return await _answer(request, service, bodies, Form.CHAT)

    async def completions(request: Request) -> Response:
        return await _answer(request, service, bodies, Form.COMPLETION)

    async def responses(request: Request) -> Response:
        return await _answer(request, service, bodies, Form.RESPONSE)

    async def tokenize_route(request: Request) -> Response:
        with service.budget.hold(request.state.salt) as hold:
            async with service.receiving():
                call = await _read(request, service, bodies, Form.TOKENIZE, hold)
                work = tokenize(service, call, request.state.request_id, hold)
                return _json(await unless_gone(request.receive, work))

    async def detokenize_route(request: Request) -> Response:
        with service.budget.hold(request.state.salt) as hold:
            async with service.receiving():
                call = await _read(request, service, bodies, Form.DETOKENIZE, hold)
                return _json(detokenize(service, call))

    posted: dict[str, Endpoint] = {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/responses": responses,
        "/tokenize": tokenize_route,
        "/detokenize": detokenize_route,
    }
    for path, endpoint in posted.items():
        # Starlette's own routes: FastAPI's would look for arguments to fill in first.
        app.add_route(path, endpoint, methods=["POST"])
    app.add_middleware(StraightOn, posted=posted)


class StraightOn:
    """ASGI, innermost of ours: a request for work goes to its endpoint without a walk through
    the routes and what FastAPI has around them, which each event of its answer would take
    back. All others, and other methods of these paths, go on as usual."""

    def __init__(self, app: ASGIApp, posted: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._posted = posted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._posted.get(scope["path"]) if wanted else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
            return
        except EpdError as error:  # nothing was sent
            response = await _on_epd_error(request, error)
        except ClientGone as error:
            response = await _on_client_gone(request, error)
        await response(scope, receive, send)


def _add_models(app: FastAPI, service: ChatService, fingerprint: str) -> None:
    started = int(time.time())

    def model_json() -> dict[str, Any]:
        return {
            "id": service.model,
            "object": "model",
            "created": started,
            "owned_by": "epd",
            "max_model_len": service.preparer.max_context,
            "fingerprint": fingerprint,
            "input_modalities": service.input_modalities,
            "output_modalities": ["text"],
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model_json()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name == service.model:
            return _json(model_json())
        reason = f"the model {name!r} is not served here"
        # A missing resource is 404, as in OpenAI's API; in a chat body it is a bad field.
        return _json(EpdError(ErrorKind.MODEL_NOT_FOUND, reason, param="model").openai_body(), 404)


def _add_state(app: FastAPI, service: ChatService) -> None:
    """What is served, and how it is. Probes ask with HEAD as well."""
    registry = service.pipeline.stages.registry

    @app.get("/openapi.json")
    async def openapi_document() -> Response:
        return Response(OPENAPI, media_type="application/json")

    @app.api_route("/version", methods=["GET", "HEAD"])
    async def version() -> Response:
        return _json({"version": __version__})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        stages = {str(stage): len(registry.live(stage)) for stage in Stage}
        reason = why_not_ready(service)
        state = "draining" if service.draining else "waiting" if reason else "ready"
        # Needs no key, so it names no worker; /debug/state does.
        body = {"status": state, "live_workers": stages}
        return _json(body, 503 if reason else 200)

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metric_page() -> Response:
        for what, value in counts(service).items():
            metrics.STATE.labels(STAGE, what).set(value)
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/debug/state")
    async def state() -> Response:
        return _json({**counts(service), "workers": registry.describe()})


def why_not_ready(service: ChatService) -> str:
    """ "" when every stage has a worker and this gateway takes requests. A service that was
    started without encoders (``epd serve --encode 0``) is for text alone and needs none."""
    if service.draining:
        return "draining"
    registry = service.pipeline.stages.registry
    needed = [stage for stage in Stage if stage is not Stage.ENCODE or service.takes_images]
    missing = [str(stage) for stage in needed if not registry.live(stage)]
    return f"no worker of: {', '.join(missing)}" if missing else ""


def counts(service: ChatService) -> dict[str, int]:
    """What is under way, zero when the gateway is idle; its tasks, and the workers that it
    would send work to."""
    registry = service.pipeline.stages.registry
    return {
        "in_flight": service.inflight,
        "held_bytes": service.budget.used,
        "held_back": service.door.held,
        "runs": service.pipeline.running,
        "teardowns": service.pipeline.teardowns,
        "streams": sum(len(worker.streams) for worker in registry.workers),
        "tasks": len(asyncio.all_tasks()),
        **{f"live_{stage}": len(registry.live(stage)) for stage in Stage},
    }


AnswerForm = Encoder | CompletionEncoder | ResponseEncoder
_ENCODERS: dict[Form, type[AnswerForm]] = {
    Form.CHAT: Encoder,
    Form.COMPLETION: CompletionEncoder,
    Form.RESPONSE: ResponseEncoder,
}


async def _read(
    request: Request, service: ChatService, bodies: BodyReader, form: Form, hold: Hold
) -> ChatCall:
    """The body, checked."""
    limit, within_s = service.config.limits.max_body_bytes, service.config.gateway.body_s
    body = await read_body(request, limit, within_s, hold)
    call = bodies.read_at_once(form, body)
    if call is None:
        reading = bodies.read_apart(form, body, request.state.salt)
        call = await unless_gone(request.receive, reading)
    salt = request.state.salt
    return call if call.salt == salt else replace(call, salt=salt)


async def _answer(
    request: Request, service: ChatService, bodies: BodyReader, form: Form
) -> Response:
    request_id, encoding = request.state.request_id, _ENCODERS[form]
    with service.budget.hold(request.state.salt) as hold:
        with beginning():
            async with service.receiving():
                call = await _read(request, service, bodies, form, hold)
        if call.stream:
            hold.keep()
            return EventStream(
                partial(_begin, service, call, request_id, hold, encoding),
                hold.release,
                encoding.refused,
                service.config.gateway.ping_s,
                service.config.limits.request_deadline_s,
            )
        whole = _whole(service, call, request_id, hold, encoding)
        content = await unless_gone(request.receive, whole)
    return Response(content, media_type="application/json")


async def _begin(
    service: ChatService,
    call: ChatCall,
    request_id: str,
    hold: Hold,
    encoding: type[AnswerForm],
) -> Begun:
    """The answer with its first output."""
    with typed(request_id):
        answer = await service.open(call, request_id, hold)
    try:
        with answer.served():
            encoder = encoding(answer, service.model, service.vocabulary)
            parts = answer.parts()
            return Begun(answer, encoder, await anext(parts), parts)
    except BaseException:
        answer.cancel()
        raise


async def _whole(
    service: ChatService,
    call: ChatCall,
    request_id: str,
    hold: Hold,
    encoding: type[AnswerForm],
) -> bytes:
    answer = await service.open(call, request_id, hold)
    try:
        with answer.served():
            encoder = encoding(answer, service.model, service.vocabulary)
            parts = [part async for part in answer.parts()]
            content = encoder.whole(parts)
        answer.finish()
        return content
    finally:
        answer.cancel()


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


# --- errors --------------------------------------------------------------------------


def error_response(error: EpdError) -> Response:
    """OpenAI's error object with the table's status."""
    response = _json(error.openai_body(), error.mapping.http_status)
    response.headers.update(retry_headers(error))
    return response


async def _on_epd_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EpdError)
    metrics.ERRORS.labels(STAGE, str(error.kind)).inc()
    extra = {"kind": str(error.kind), "param": error.param}
    _log.log(error.log_level, "refused: %s", error.for_log, extra=extra)
    return error_response(without_frames(error))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    _log.info("the client is gone")
    return error_response(EpdError(ErrorKind.CANCELLED, "the client is gone"))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    what = EpdError(
        ErrorKind.INVALID_REQUEST, f"{request.method} {request.url.path}: {error.detail}"
    )
    response = _json(what.openai_body(), error.status_code)
    response.headers.update(error.headers or {})
    return response


def _add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(EpdError, _on_epd_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(StarletteHTTPException, _on_http_error)
    app.add_exception_handler(HTTPException, _on_http_error)
