"""Whether the small files of a checkpoint can be used, without torch and transformers.

Loading finds the same faults, four seconds later, in several processes at once, in the words
of whatever library stumbled first. Here each is one sentence that names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epd.errors import EpdError, invalid
from epd.models import families

CHECKED = "EPD_CHECKED_TOKENIZER"
"""In the environment: the file that this process, or whoever started it, has found to be a
tokenizer. Reading one of 150,000 tokens takes 0.6 s, which not each process of a service needs
to spend."""
_LFS = b"version https://git-lfs"
_TEMPLATE = "chat_template.jinja"
_TEMPLATE_JSON = "chat_template.json"
_PICTURES = ("preprocessor_config.json", "processor_config.json")


def require_config(path: str | Path) -> None:
    """Return if ``config.json`` is there and of a family that is served.

    Raises:
        EpdError: it names the file.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise _bad(file, "is missing, so this is no checkpoint")
    family = _object(file).get("model_type")
    if not isinstance(family, str):
        raise _bad(file, "has no model_type, so nobody can tell what model this is")
    if reason := families.unserved(family):
        raise _bad(file, f"models of the family {family!r} can't be served: {reason}")


def require_processor(path: str | Path) -> None:
    """Return if tokenizer, image processor and chat template are there, and can be read.

    Raises:
        EpdError: it names the file.
    """
    folder = Path(path)
    _require_tokenizer(folder)
    named = {name: _object(folder / name) for name in _PICTURES if (folder / name).is_file()}
    described = _PICTURES[0] in named or "image_processor" in named.get(_PICTURES[1], {})
    if not described:
        raise _bad(folder / _PICTURES[0], "is missing; it says how pictures are prepared")
    if (file := folder / "generation_config.json").is_file():
        _object(file)
    _require_template(folder)


def _require_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    if file.is_file():
        _check_tokenizer(file)
    elif (words := folder / "vocab.json").is_file():
        _object(words)
        if not (merges := folder / "merges.txt").is_file():
            raise _bad(merges, "is missing; vocab.json needs it")
    elif not (folder / "tokenizer.model").is_file():
        raise _bad(file, "is missing; there is no tokenizer")
    if not (file := folder / "tokenizer_config.json").is_file():
        raise _bad(file, "is missing; it says which special tokens the tokenizer has")
    _object(file)


def _check_tokenizer(file: Path) -> None:
    """By the library that will read it: a file may be JSON and no tokenizer."""
    seal = _seal(file)
    if os.environ.get(CHECKED) == seal:
        return
    model = _object(file).get("model")
    if not isinstance(model, Mapping) or not model.get("vocab"):
        raise _bad(file, "is no tokenizer: it has no vocabulary")
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # that library raises nothing more special
        raise _bad(file, f"is no tokenizer that can be read: {_brief(error)}") from error
    os.environ[CHECKED] = seal


def _seal(file: Path) -> str:
    """Another one if the file is another, or was written to."""
    found = file.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return ":".join(map(str, (found.st_dev, found.st_ino, found.st_size, *times)))


def _require_template(folder: Path) -> None:
    file, source = _template(folder)
    if not isinstance(source, str) or not source.strip():
        raise _bad(file, "holds no chat template, and there is none elsewhere")
    from jinja2 import TemplateSyntaxError

    try:
        _environment().parse(source)
    except TemplateSyntaxError as error:
        reason = f"the chat template can't be read: line {error.lineno}: {error.message}"
        raise _bad(file, reason) from error


def _template(folder: Path) -> tuple[Path, Any]:
    """The file that transformers would take the template from, and what is there."""
    if (file := folder / _TEMPLATE).is_file():
        try:
            return file, file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise _bad(file, f"can't be read: {_brief(error)}") from error
    for name in (_TEMPLATE_JSON, _PICTURES[1], "tokenizer_config.json"):
        if (file := folder / name).is_file() and "chat_template" in (found := _object(file)):
            return file, _default(found["chat_template"])
    return folder / _TEMPLATE, None


def _default(template: Any) -> Any:
    """The one that is used, where there are several under names of their own."""
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping)]
        template = {entry.get("name"): entry.get("template") for entry in named}
    return template.get("default") if isinstance(template, Mapping) else template


def _environment() -> Any:
    """A parser of the dialect that transformers renders."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """Marks what a model wrote; for training, and no matter here."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])


def _object(file: Path) -> Mapping[str, Any]:
    try:
        raw = file.read_bytes()
        found = json.loads(raw)
    except OSError as error:
        raise _bad(file, f"can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if raw.startswith(_LFS):
            raise _bad(file, "a git-lfs pointer, not the file: run 'git lfs pull'") from error
        what = "is empty" if not raw.strip() else f"is no JSON: {_brief(error)}"
        raise _bad(file, what) from error
    if not isinstance(found, dict):
        raise _bad(file, "must be a JSON object")
    return found


def _brief(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:200]


def _bad(file: Path, what: str) -> EpdError:
    return invalid(f"{file}: {what}", "model.path")
