"""The OpenAPI document of the HTTP API.

Written by hand: bodies are checked by `gateway.schema`, field by field, which no
generator sees. Tests send what it describes (`tests/contract`).
"""

from __future__ import annotations

from typing import Any

import orjson

from epd import __version__

_NUMBER, _INTEGER, _STRING, _BOOLEAN = (
    {"type": kind} for kind in ("number", "integer", "string", "boolean")
)


def _between(low: float, high: float, base: dict[str, str] = _NUMBER) -> dict[str, Any]:
    return {**base, "minimum": low, "maximum": high}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


_GENERATION: dict[str, Any] = {
    "max_tokens": _between(1, 2**31 - 1, _INTEGER),
    "min_tokens": _between(0, 2**31 - 1, _INTEGER),
    "temperature": _between(0, 2),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _between(-1, 2**31 - 1, _INTEGER),
    "min_p": _between(0, 1),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "logit_bias": {"type": "object", "additionalProperties": _between(-100, 100)},
    "seed": _INTEGER,
    "stop": {
        "oneOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}},
        ]
    },
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "ignore_eos": _BOOLEAN,
    "n": {"type": "integer", "minimum": 1},
    "stream": _BOOLEAN,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _BOOLEAN},
        "additionalProperties": False,
    },
    "response_format": {"type": "object", "required": ["type"]},
    "guided_json": {"type": "object"},
    "guided_regex": _STRING,
    "guided_choice": {"type": "array", "items": _STRING, "minItems": 1},
    "user": _STRING,
    "safety_identifier": _STRING,
    "prompt_cache_key": _STRING,
    "metadata": {"type": "object"},
}
_TOOLS: dict[str, Any] = {
    "tools": {"type": "array", "items": _ref("Tool")},
    "tool_choice": {
        "oneOf": [
            {"type": "string", "enum": ["none", "auto", "required"]},
            {"type": "object", "required": ["type", "function"]},
        ]
    },
    "parallel_tool_calls": _BOOLEAN,
}
_MESSAGES = {"type": "array", "items": _ref("Message"), "minItems": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {"oneOf": [{"type": "string", "minLength": 1}, _IDS]}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


_SCHEMAS: dict[str, Any] = {
    "ChatRequest": _object(
        ["model", "messages"],
        model=_STRING,
        messages=_MESSAGES,
        max_completion_tokens=_between(1, 2**31 - 1, _INTEGER),
        logprobs=_BOOLEAN,
        top_logprobs=_between(0, 20, _INTEGER),
        timeline=_BOOLEAN,
        **_GENERATION,
        **_TOOLS,
    ),
    "CompletionRequest": _object(
        ["model", "prompt"],
        model=_STRING,
        prompt=_PROMPT,
        logprobs=_between(0, 5, _INTEGER),
        **_GENERATION,
    ),
    "ResponseRequest": {
        "type": "object",
        "required": ["model", "input"],
        "properties": {
            "model": _STRING,
            "input": {"oneOf": [_STRING, {"type": "array", "items": {"type": "object"}}]},
            "instructions": _STRING,
            "max_output_tokens": _between(1, 2**31 - 1, _INTEGER),
            "stream": _BOOLEAN,
        },
    },
    "TokenizeRequest": _object([], model=_STRING, prompt=_PROMPT, messages=_MESSAGES, **_TOOLS),
    "DetokenizeRequest": _object(["tokens"], model=_STRING, tokens=_IDS),
    "Message": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "oneOf": [_STRING, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
            },
            "tool_calls": {"type": "array", "items": {"type": "object"}},
            "tool_call_id": _STRING,
            "name": _STRING,
        },
        "additionalProperties": False,
    },
    "Tool": _object(
        ["type", "function"],
        type={"const": "function"},
        function={"type": "object", "required": ["name"]},
    ),
    "Error": _object(
        ["error"],
        error={
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    ),
    "Answer": {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
    },
    "Any": {"type": "object"},
}
_ERRORS = {
    "400": "A field is wrong; `param` names it.",
    "401": "No valid API key.",
    "405": "No such method.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "429": "Too many requests; see Retry-After.",
    "500": "A fault of the server.",
    "503": "No worker can serve it now; see Retry-After.",
    "504": "The deadline has passed.",
}


def _json(schema: str, description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": _ref(schema)}},
    }


def _operation(summary: str, answer: str, body: str = "", stream: bool = False) -> dict[str, Any]:
    done = _json(answer, "Done.")
    if stream:
        done["content"]["text/event-stream"] = {"schema": _STRING}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": done,
            **{status: _json("Error", reason) for status, reason in _ERRORS.items()},
        },
    }
    if body:
        content = {"application/json": {"schema": _ref(body)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _model() -> dict[str, Any]:
    operation = _operation("What one model takes.", "Any")
    name = {"name": "name", "in": "path", "required": True}
    operation["parameters"] = [{**name, "schema": {"type": "string", "minLength": 1}}]
    operation["responses"]["404"] = _json("Error", "It isn't served here.")
    return operation


def _ready() -> dict[str, Any]:
    operation = _operation("Requests are taken.", "Any")
    operation["responses"]["503"] = _json("Any", "Not yet, or no more; `status` says which.")
    return operation


_PATHS: dict[str, Any] = {
    "/v1/chat/completions": {
        "post": _operation("Answer a conversation.", "Answer", "ChatRequest", stream=True)
    },
    "/v1/completions": {
        "post": _operation("Go on with a prompt.", "Answer", "CompletionRequest", stream=True)
    },
    "/v1/responses": {
        "post": _operation("Answer, statelessly.", "Any", "ResponseRequest", stream=True)
    },
    "/v1/models": {"get": _operation("What is served.", "Any")},
    "/v1/models/{name}": {"get": _model()},
    "/tokenize": {"post": _operation("Ids of a prompt.", "Any", "TokenizeRequest")},
    "/detokenize": {"post": _operation("Text of ids.", "Any", "DetokenizeRequest")},
    "/version": {"get": _operation("Version of this server.", "Any")},
    "/health": {"get": _operation("The process lives.", "Any")},
    "/ready": {"get": _ready()},
}
DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "epd", "version": __version__},
    "paths": _PATHS,
    "components": {
        "schemas": _SCHEMAS,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    },
    "security": [{}, {"key": []}],
}
OPENAPI = orjson.dumps(DOCUMENT)
