"""`epd.client` against a gateway over scripted stages, and JSON over reflection."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from PIL import Image

from epd.client import AsyncClient, Client, Model, assistant, system, user
from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason
from tests.e2e.fake_stages import hang
from tests.e2e.gateway_house import House
from tests.waiting import soon


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(buffer, "PNG")
    return buffer.getvalue()


def said(house: House) -> str:
    text: str = house.gateway.service.tokenizer.decode(house.script.output)
    return text


async def test_async(house: House) -> None:
    talk = [system("short"), user("hi"), assistant("ho"), user("what?", picture())]
    async with AsyncClient(house.grpc) as client:
        answer = await client.chat(talk, logprobs=True, n=2)
        deltas = [delta async for delta in client.stream(talk)]
        (model,) = await client.models()
    assert answer.text == said(house)
    assert answer.reasons == [FinishReason.STOP] * 2
    assert answer.texts[1] != answer.text
    assert answer.usage.image_tokens > 0
    assert answer.usage.completion_tokens == 2 * len(house.script.output)
    assert {token.logprob for token in answer.tokens[0]} == {-0.5}
    assert "".join(delta.text for delta in deltas) == answer.text
    assert (model.id, model.input_modalities) == ("demo", ("text", "image"))


async def test_the_proxy_of_the_environment_is_asked_unless_told_not_to(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def models(trust_env: bool = True) -> list[Model]:
        with Client(house.grpc, trust_env=trust_env) as client:
            return client.models()

    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EpdError) as caught:
        await asyncio.to_thread(models)
    assert caught.value.kind is ErrorKind.STAGE_UNAVAILABLE
    assert len(await asyncio.to_thread(models, False)) == 1
    async with AsyncClient(house.grpc, trust_env=False) as client:
        assert len(await client.models()) == 1
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert len(await asyncio.to_thread(models)) == 1


async def test_one_stop_string_is_one(house: House) -> None:
    async with AsyncClient(house.grpc) as client:
        answer = await client.chat([user("what?")], stop="never said")
        assert answer.text == said(house)
        stop = said(house)[2:4]
        answer = await client.chat([user("what?")], stop=stop)
        assert answer.text == said(house).partition(stop)[0]
        with pytest.raises(EpdError) as caught:
            await client.chat([user("what?")], guided_choice="yes")
        assert caught.value.param == "options.guided_choice"


async def test_sync(house: House) -> None:
    def talk() -> tuple[Any, str]:
        with Client(house.grpc, timeout_s=20) as client:
            answer = client.chat([user("what?")])
            return answer, "".join(delta.text for delta in client.stream([user("what?")]))

    answer, streamed = await asyncio.to_thread(talk)
    assert answer.text == streamed == said(house)
    assert answer.reason is FinishReason.STOP
    assert answer.request_id


async def test_faults_have_their_kind_and_field(house: House) -> None:
    async with AsyncClient(house.grpc) as client:
        for options, param in (
            ({"temperature": 9.0}, "options.temperature"),
            ({"x": 1}, "options"),
        ):
            with pytest.raises(EpdError) as caught:
                await client.chat([user("a")], **options)
            assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_REQUEST, param)
    house.script.hooks["decode.token"] = hang

    def slow() -> None:
        with Client(house.grpc, timeout_s=0.5) as client:
            client.chat([user("a")])

    with pytest.raises(EpdError) as caught:
        await asyncio.to_thread(slow)
    assert caught.value.kind is ErrorKind.DEADLINE_EXCEEDED
    await house.settled()


async def test_a_stream_that_is_left_is_cancelled(house: House) -> None:
    house.script.hooks["decode.token"] = hang
    async with AsyncClient(house.grpc) as client:
        stream = client.stream([user("a")])
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await house.settled()
    assert "decode: Cancel" in house.journal


class Cable:
    """Carries bytes between a client and a gateway until it is `cut`: then neither hears of
    the other any more, nor of an end."""

    def __init__(self, gateway: str) -> None:
        self._host, _, port = gateway.rpartition(":")
        self._port = int(port)
        self.cut = False
        self._ends: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        for writer in self._ends:
            writer.close()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        self._ends += [writer, back]
        await asyncio.gather(self._carry(reader, back), self._carry(there, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.cut:
                writer.write(data)


async def test_a_gateway_that_is_gone_without_a_word_keeps_nobody_waiting(house: House) -> None:
    house.script.hooks["decode.token"] = hang
    cable = Cable(house.grpc)
    async with cable as address, AsyncClient(address, keepalive_s=0.5) as client:
        stream = client.stream([user("a")])
        await anext(stream)
        cable.cut = True
        with (
            soon(50, instead_of="gRPC's own minute, or the request's deadline"),
            pytest.raises(EpdError) as caught,
        ):
            await anext(stream)
    assert caught.value.kind is ErrorKind.STAGE_UNAVAILABLE


async def test_structured_output_over_grpc(house: House) -> None:
    async with AsyncClient(house.grpc) as client:
        await client.chat([user("a")], guided_choice=["a", "b"])
        with pytest.raises(EpdError) as caught:
            await client.chat([user("a")], guided_json="{")
    assert caught.value.param == "options.guided_json"
    grammars = [job.sampling.grammar for _, job in house.script.jobs]
    assert {grammar.lark for grammar in grammars} == {'start: "a" | "b"'}


async def test_json_over_reflection_as_grpcurl_does(house: House) -> None:
    """What ``grpcurl -d @ HOST epd.v1.Gateway/Chat`` does: no stubs, only reflection."""

    def ask() -> list[Any]:
        with grpc.insecure_channel(house.grpc) as channel:
            pool = reflected(channel, "epd.v1.Gateway")
            method = pool.FindServiceByName("epd.v1.Gateway").FindMethodByName("Chat")
            request = message_factory.GetMessageClass(method.input_type)()
            json_format.Parse(
                '{"messages": [{"role": "ROLE_USER", "parts": [{"text": "what?"}]}]}', request
            )
            call = channel.unary_stream(
                "/epd.v1.Gateway/Chat",
                request_serializer=type(request).SerializeToString,
                response_deserializer=message_factory.GetMessageClass(
                    method.output_type
                ).FromString,
            )
            return [json_format.MessageToDict(event) for event in call(request)]

    events = await asyncio.to_thread(ask)
    text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
    assert text == said(house)
    assert events[-1]["finished"]["reason"] == "FINISH_REASON_STOP"


def reflected(channel: grpc.Channel, service: str) -> descriptor_pool.DescriptorPool:
    """Descriptors of a service, dependencies first."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    found: dict[str, descriptor_pb2.FileDescriptorProto] = {}

    def fetch(**query: str) -> None:
        request = reflection_pb2.ServerReflectionRequest(**query)
        (reply,) = stub.ServerReflectionInfo(iter([request]))
        for raw in reply.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            if file.name not in found:
                found[file.name] = file
                for name in file.dependency:
                    fetch(file_by_filename=name)

    fetch(file_containing_symbol=service)
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str) -> None:
        if name not in added:
            added.add(name)
            for dependency in found[name].dependency:
                add(dependency)
            pool.Add(found[name])

    for name in found:
        add(name)
    return pool
