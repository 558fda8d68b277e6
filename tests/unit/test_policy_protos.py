"""Every message, field, enum value and call of the protos says why it is there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "protos/epd/v1"

# Numbers of the fields of FileDescriptorProto and its parts, as paths are made of them
# (google/protobuf/descriptor.proto, SourceCodeInfo.Location).
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _NESTED, _NESTED_ENUM, _VALUE, _METHOD = 2, 3, 4, 2, 2

_FILLERS = {"a", "an", "the", "of", "this", "that", "its", "is", "for", "to", "one"}

Named = tuple[tuple[int, ...], str]


def described(folder: Path) -> list[FileDescriptorProto]:
    """All files under `folder`, with their comments."""
    sources = sorted(str(path.relative_to(folder)) for path in (folder / FOLDER).glob("*.proto"))
    output = "/dev/stdout"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_source_info"]
    done = subprocess.run(
        [*command, f"--descriptor_set_out={output}", *sources],
        cwd=folder,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    return list(FileDescriptorSet.FromString(done.stdout).file)


def _enum(path: tuple[int, ...], enum: EnumDescriptorProto) -> Iterator[Named]:
    yield path, enum.name
    for i, value in enumerate(enum.value):
        yield (*path, _VALUE, i), f"{enum.name}.{value.name}"


def _message(path: tuple[int, ...], message: DescriptorProto) -> Iterator[Named]:
    yield path, message.name
    for i, field in enumerate(message.field):
        yield (*path, _FIELD, i), f"{message.name}.{field.name}"
    for i, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message((*path, _NESTED, i), nested)
    for i, enum in enumerate(message.enum_type):
        yield from _enum((*path, _NESTED_ENUM, i), enum)


def _service(path: tuple[int, ...], service: ServiceDescriptorProto) -> Iterator[Named]:
    yield path, service.name
    for i, method in enumerate(service.method):
        yield (*path, _METHOD, i), f"{service.name}.{method.name}"


def named(file: FileDescriptorProto) -> Iterator[Named]:
    """Path and name of everything in a file that needs a comment."""
    for i, message in enumerate(file.message_type):
        yield from _message((_MESSAGE, i), message)
    for i, enum in enumerate(file.enum_type):
        yield from _enum((_ENUM, i), enum)
    for i, service in enumerate(file.service):
        yield from _service((_SERVICE, i), service)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def silent(file: FileDescriptorProto) -> list[str]:
    """What has no comment before it, or one that only repeats its name."""
    comments = {
        tuple(location.path): location.leading_comments.strip()
        for location in file.source_code_info.location
    }
    return [
        f"{file.name}: {name}"
        for path, name in named(file)
        if not _words(comments.get(path, "")) - _words(re.sub(r"[._]", " ", name)) - _FILLERS
    ]


def test_everything_in_the_protos_says_why() -> None:
    files = described(ROOT)
    assert len(files) == len(list((ROOT / FOLDER).glob("*.proto")))
    assert sum(len(list(named(file))) for file in files) > 200
    assert [line for file in files for line in silent(file)] == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("// A box of tools.\nmessage Box { uint32 lid = 1; }", "Box.lid"),
        ("// A box of tools.\nmessage Box {\n// The lid.\n uint32 lid = 1; }", "Box.lid"),
        ("message Box {}", "Box"),
        ("// How it shuts.\nenum Lid { LID_UNSPECIFIED = 0; }", "Lid.LID_UNSPECIFIED"),
        (
            "// A box of tools.\nmessage Box {\n// What shuts it.\n message Lid {}\n"
            " // Which of them it is.\n oneof kind { uint32 hinged = 1; } }",
            "Box.hinged",
        ),
        (
            "// A box of tools.\nmessage Box {}\n// Who opens it.\n"
            "service Opener { rpc Open(Box) returns (Box); }",
            "Opener.Open",
        ),
    ],
)
def test_a_silent_one_is_noticed(tmp_path: Path, text: str, missing: str) -> None:
    source = tmp_path / FOLDER / "box.proto"
    source.parent.mkdir(parents=True)
    source.write_text(f'syntax = "proto3";\npackage epd.v1;\n\n{text}\n')
    (file,) = described(tmp_path)
    assert silent(file) == [f"{FOLDER}/box.proto: {missing}"]
