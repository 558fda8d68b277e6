"""What one prompt may take of the process that builds it: CPU time, memory, patience."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from epd.config import ModelConfig
from epd.errors import EpdError, ErrorKind
from epd.text.messages import ChatMessage, TextPart
from epd.text.prompt import PromptPlan
from gateway.prompt_process import Bounds
from gateway.prompts import PromptPool
from tests.unit.test_gateway_prompts import child
from tests.waiting import until

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
SLOW = """{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"""
LARGE = """{{ c.text * 180000000 }}"""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PromptPool]:
    """Of a template that takes what a message says of it: time, or memory. One for all tests:
    its process takes seconds to start."""
    hostile = tmp_path_factory.mktemp("hostile")
    shutil.copytree(DEMO, hostile, dirs_exist_ok=True)
    (hostile / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.content %}{{ c.text }}"
        f"{{% if c.text == 'slow' %}}{SLOW}{{% elif c.text == 'large' %}}{LARGE}{{% endif %}}"
        "{% endfor %}{% endfor %}"
    )
    pool = PromptPool(ModelConfig(path=str(hostile)), 1, bounds=Bounds(cpu_s=1, mib=512))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def said(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", (TextPart(text),))]


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of what is said of processes that ended."""
    found = [one for one in caplog.records if one.getMessage().startswith("a prompt process")]
    return [one.levelname for one in found]


async def test_a_prompt_that_takes_too_much_memory_is_refused(pool: PromptPool) -> None:
    before = pool.rebuilt
    with pytest.raises(EpdError, match="takes more than 512 MiB") as caught:
        await pool.build(said("large"), (), 999)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert isinstance(await pool.build(said("a"), (), 999), PromptPlan)
    assert pool.rebuilt == before


async def test_a_process_that_waits_for_ever_is_ended(
    pool: PromptPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with monkeypatch.context() as patch:
        patch.setattr("gateway.prompt_lives._PATIENCE", 1)
        await pool.build(said("a"), (), 999)  # from its reply on it is so patient
        child().suspend()
        with pytest.raises(EpdError, match="more than 1 s"):
            await asyncio.wait_for(pool.build(said("a"), (), 999), 30)
    assert levels(caplog) == ["WARNING"], "no client can make it wait"
    assert isinstance(await pool.build(said("a"), (), 999), PromptPlan)


async def test_a_prompt_that_takes_too_long_dies_alone(
    pool: PromptPool, caplog: pytest.LogCaptureFixture
) -> None:
    """By CPU time, so that a machine that is full is no reason; others go on."""
    caplog.set_level("INFO")
    before = pool.rebuilt
    asked = [asyncio.create_task(pool.build(said(t), (), 999)) for t in ("slow", "a", "b")]
    slow, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(slow, EpdError)
    assert slow.kind is ErrorKind.INVALID_REQUEST
    assert (slow.param, slow.retry_after_s) == ("messages", None)
    assert slow.message == "messages: the prompt takes more than 1 s to build"
    assert all(isinstance(other, PromptPlan) for other in others)
    assert levels(caplog) == ["INFO"], "it is the client's prompt"
    # A process that has just begun its life is no exception.
    os.kill(child().pid, signal.SIGKILL)
    await until(lambda: pool.rebuilt == before + 2)
    await until(lambda: levels(caplog) == ["INFO", "ERROR"])
    with pytest.raises(EpdError, match="more than 1 s"):
        await pool.build(said("slow"), (), 999)
    assert pool.rebuilt == before + 3
