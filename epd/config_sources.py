"""Where a configuration comes from: file < environment < flags.

Environment variables are ``EPD_`` + path with double underscores, e.g.
``EPD_PREFILL__STEP_TOKENS=512``. The file is TOML (``--config`` or ``EPD_CONFIG``).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from epd.config import Config
from epd.errors import invalid

_LISTS = frozenset({"gateways", "hosts", "ports", "api_keys", "cors_origins", "networks", "stages"})
"""Keys whose value is a comma-separated list in environment and flags."""
_KEYS = ["gateway", "api_keys"]


def load_config(
    file: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merge file, environment and flags (``{"prefill.step_tokens": 64}``).

    Raises:
        EpdError: a key is unknown or a value is out of range; the message names the key.
    """
    environ = os.environ if environ is None else environ
    tree: dict[str, Any] = {}
    file = file or environ.get("EPD_CONFIG")
    if file:
        _merge(tree, _read_file(Path(file)))
    for key, value in environ.items():
        if key.startswith("EPD_") and "__" in key:
            _set(tree, key.removeprefix("EPD_").lower().split("__"), value)
    for key, value in (flags or {}).items():
        if value is not None:
            _set(tree, key.split("."), value)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        unknown = first["type"] == "extra_forbidden"
        reason = "there is no such key" if unknown else first["msg"]
        raise invalid(f"configuration: {where}: {reason}", where) from error


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid(f"configuration file {path}: {error}", "config") from error


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for depth, part in enumerate(path[:-1], start=1):
        below = tree.setdefault(part, {})
        if not isinstance(below, dict):
            where = ".".join(path[:depth])
            raise invalid(f"configuration: {where}: is a section, not a value", where)
        tree = below
    if path[-1] in _LISTS and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
        if path == _KEYS and not value:
            # Of a secret that is missing (`$KEY`): the port would be open to anybody.
            reason = "is given, but holds no key; leave it out to let anybody call"
            raise invalid(f"configuration: gateway.api_keys: {reason}", "gateway.api_keys")
    tree[path[-1]] = value
