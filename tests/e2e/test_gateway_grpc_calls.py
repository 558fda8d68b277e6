"""What clients see of the gateway over gRPC, over scripted stages."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epd.errors import ErrorKind
from epd.jobs import Stage
from epd.rpc.channels import dial
from protos.epd.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import House, picture
from tests.waiting import LIMIT_S

# --- gRPC --------------------------------------------------------------------------------


def chat_request(*, images: int = 0, **options: Any) -> gateway_pb2.ChatRequest:
    import base64

    url = picture()["image_url"]["url"]
    file = base64.b64decode(url.partition(",")[2])
    parts = [gateway_pb2.ContentPart(image=file) for _ in range(images)]
    parts.append(gateway_pb2.ContentPart(text="what is it?"))
    message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts)
    options.setdefault("max_tokens", 64)
    return gateway_pb2.ChatRequest(
        messages=[message], options=gateway_pb2.GenerationOptions(**options)
    )


class Public:
    """A client of the public gRPC API."""

    def __init__(self, house: House) -> None:
        self.channel = dial(house.grpc, house.gateway.service.config.rpc)
        self.stub = gateway_pb2_grpc.GatewayStub(self.channel)

    async def chat(self, request: gateway_pb2.ChatRequest, **call: Any) -> list[Any]:
        return [event async for event in self.stub.Chat(request, **call)]


@pytest.fixture
async def public(house: House) -> Any:
    client = Public(house)
    yield client
    await client.channel.close()


async def test_grpc_says_what_http_says(house: House, public: Public) -> None:
    whole = (await house.chat(images=1)).json()
    events = await public.chat(chat_request(images=1))
    kinds = [event.WhichOneof("kind") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    text = "".join(event.delta.text for event in events[1:-1])
    assert text == whole["choices"][0]["message"]["content"]
    finished = events[-1].finished
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    usage = whole["usage"]
    assert finished.usage.prompt_tokens == usage["prompt_tokens"]
    assert finished.usage.completion_tokens == usage["completion_tokens"]
    assert finished.usage.image_tokens == usage["prompt_tokens_details"]["image_tokens"] > 0
    assert "prefill" in [phase.name for phase in finished.timeline.phases]


async def test_grpc_options_reach_the_stages(house: House, public: Public) -> None:
    await public.chat(chat_request(temperature=0.5, seed=2**63 + 1, top_k=3, ignore_eos=True))
    sampling = house.script.jobs_of(Stage.PREFILL)[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.5, 2**63 + 1, 3)
    assert sampling.ignore_eos


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": float("nan")}, "options.temperature"),
        ({"temperature": float("inf")}, "options.temperature"),
        ({"max_tokens": 0}, "options.max_tokens"),
        ({"logit_bias": {10**6: 1.0}}, "options.logit_bias.1000000"),
        ({"stop_token_ids": [10**9]}, "options.stop_token_ids[0]"),
        ({"top_logprobs": 3}, "options.top_logprobs"),
    ],
)
async def test_grpc_names_the_bad_field(
    public: Public, house: House, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await public.chat(chat_request(**change))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert _info(caught.value).metadata["param"] == param
    assert house.journal == []


def _info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    status = status_pb2.Status.FromString(
        dict(error.trailing_metadata())["grpc-status-details-bin"]
    )
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


async def test_grpc_refuses_messages_that_say_nothing_or_something_unknown(public: Public) -> None:
    for request in (
        gateway_pb2.ChatRequest(),
        gateway_pb2.ChatRequest(messages=[gateway_pb2.Message()]),
        gateway_pb2.ChatRequest(
            messages=[
                gateway_pb2.Message(
                    role=gateway_pb2.ROLE_USER, parts=[gateway_pb2.ContentPart(image=b"no image")]
                )
            ]
        ),
        gateway_pb2.ChatRequest(
            messages=[
                gateway_pb2.Message(
                    role=gateway_pb2.ROLE_USER,
                    parts=[gateway_pb2.ContentPart(image=b"", detail=9)],  # type: ignore[arg-type]
                )
            ]
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await public.chat(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert _info(caught.value).metadata["param"].startswith("messages")


async def test_a_fault_ends_the_grpc_call_with_its_status(house: House, public: Public) -> None:
    house.script.hooks["decode.token"] = fail(ErrorKind.CHECKSUM_MISMATCH)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await public.chat(chat_request())
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert _info(caught.value).reason == "checksum_mismatch"


async def test_a_grpc_client_may_leave(house: House, public: Public) -> None:
    reached = asyncio.Event()

    async def wait(call: Call) -> None:
        reached.set()
        await hang(call)

    house.script.hooks["decode.token"] = wait
    call = public.stub.Chat(chat_request())
    await call.read()
    await asyncio.wait_for(reached.wait(), LIMIT_S)
    call.cancel()
    await house.settled()
    assert "decode: Cancel" in house.journal


async def test_a_grpc_deadline_is_the_requests(house: House, public: Public) -> None:
    house.script.hooks["decode.fetch"] = hang
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await public.chat(chat_request(), timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await house.settled()


async def test_grpc_lists_models_and_is_healthy(public: Public) -> None:
    models = (await public.stub.ListModels(gateway_pb2.ListModelsRequest())).models
    assert [model.id for model in models] == ["demo"]
    assert list(models[0].input_modalities) == ["text", "image"]
    check = health_pb2.HealthCheckRequest(service="epd.v1.Gateway")
    reply = await health_pb2_grpc.HealthStub(public.channel).Check(check)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
