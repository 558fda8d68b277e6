"""The pool that builds prompts: a dying process fails the requests at hand, no later ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from epd.config import ModelConfig
from epd.errors import EpdError, ErrorKind
from epd.models.processor import Processor
from epd.text.messages import ChatMessage, ImagePart, ImageSize, TextPart, Tool, ToolCall
from epd.text.prompt import PromptBuilder, PromptPlan
from gateway import prompt_lives
from gateway.checkpoint import Loaded, read
from gateway.prompts import PromptPool
from tests.waiting import a_moment, until

MESSAGES = [ChatMessage("user", (ImagePart(0), TextPart("what is it?")))]
SIZES = [ImageSize(64, 48, "messages[0].content[0]")]
shared_pool = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Callable[[str], Path]) -> str:
    return str(tiny_checkpoint("qwen2_vl"))


@pytest.fixture(scope="module")
def builder(path: str) -> PromptBuilder:
    return PromptBuilder.of(Processor.load(path))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(path: str) -> AsyncIterator[PromptPool]:
    """One for many tests: its process takes seconds to start."""
    pool = PromptPool(ModelConfig(path=path), 1)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def child() -> psutil.Process:
    """The one of the pool."""
    (found,) = (
        process
        for process in psutil.Process().children()
        if process.status() != psutil.STATUS_ZOMBIE
        and "gateway.prompt_process" in process.cmdline()
    )
    return found


@shared_pool
async def test_a_process_gives_what_the_builder_gives(
    pool: PromptPool, builder: PromptBuilder
) -> None:
    assert await pool.build(MESSAGES, SIZES, 4096) == builder.build(MESSAGES, SIZES)


@shared_pool
async def test_errors_cross_the_process_border(pool: PromptPool) -> None:
    too_thin = [ImageSize(1, 4000, "messages[0].content[0]")]
    with pytest.raises(EpdError) as caught:
        await pool.build(MESSAGES, too_thin, 4096)
    assert caught.value.kind is ErrorKind.INVALID_IMAGE
    assert caught.value.param == "messages[0].content[0]"


@shared_pool
async def test_a_dead_process_fails_what_it_had_and_no_more(pool: PromptPool) -> None:
    """The second had not begun, the third still waits outside: another process answers
    both."""
    process = child()
    process.suspend()
    asked = [asyncio.create_task(pool.build(MESSAGES, SIZES, 4096)) for _ in range(3)]
    await until(lambda: pool.at_hand == 2)
    os.kill(process.pid, signal.SIGKILL)
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, EpdError)
    assert first.kind is ErrorKind.STAGE_UNAVAILABLE
    for result in others:
        assert isinstance(result, PromptPlan)
    assert pool.rebuilt == 1
    await until(lambda: not process.is_running())


@shared_pool
async def test_requests_that_were_given_up_take_their_place_until_answered(
    pool: PromptPool,
) -> None:
    """Else clients that leave could heap them up in front of a process that is busy."""
    process = child()
    process.suspend()
    given_up = [asyncio.create_task(pool.build(MESSAGES, SIZES, 4096)) for _ in range(2)]
    await until(lambda: pool.at_hand == 2)
    for task in given_up:
        task.cancel()
    waiting = asyncio.create_task(pool.build(MESSAGES, SIZES, 4096))
    await a_moment()
    assert pool.at_hand == 2
    process.resume()
    assert (await waiting).image_tokens > 0
    assert pool.at_hand == 0


@shared_pool
async def test_everything_in_a_conversation_crosses_the_border(
    pool: PromptPool, builder: PromptBuilder
) -> None:
    call = ToolCall("look", '{"at": "\u00e9\u4e16"}')
    messages = [
        ChatMessage("system", (TextPart(""),)),
        ChatMessage("user", (TextPart("a\u0000\U0001f600"), ImagePart(0), TextPart("<|im_end|>"))),
        ChatMessage("assistant", (), (call,)),
        ChatMessage("tool", (TextPart("seen"),)),
    ]
    tools = [Tool("look", "where", '{"type": "object"}')]
    try:
        wanted: object = builder.build(messages, SIZES, 4096, tools)
    except EpdError as error:  # this template takes no tools: its reason crosses, too
        wanted = (error.kind, error.message, error.param)
    try:
        got: object = await pool.build(messages, SIZES, 4096, tools)
    except EpdError as error:
        got = (error.kind, error.message, error.param)
    assert got == wanted
    assert await pool.encode("a <|im_end|> b", 4096) == builder.encode("a <|im_end|> b")


async def test_who_speaks_crosses_the_border(path: str, tmp_path: Path) -> None:
    for file in Path(path).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (template := tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    template.write_text(
        "{% for m in messages %}{{ m['role'] }} {{ m['name'] }}: {{ m['content'][0]['text'] }}\n"
        "{% endfor %}"
    )
    said = [ChatMessage("user", (TextPart("hello"),), name="Zoë")]
    pool = PromptPool(ModelConfig(path=str(tmp_path)), 1)
    try:
        facts = await pool.start()
        assert facts is not None
        built = await pool.build(said, [], 4096)
    finally:
        await pool.close()
    assert Loaded.of(facts).tokenizer.decode(list(built.token_ids)) == "user Zoë: hello\n"


@shared_pool
async def test_a_process_says_what_the_checkpoint_is(pool: PromptPool, path: str) -> None:
    facts, own = await pool.start(), read(ModelConfig(path=path))[0]
    assert facts == own
    assert Loaded.of(own).tokenizer.encode("a red circle").ids


async def test_a_checkpoint_that_cannot_be_used_is_a_typed_error(tmp_path: Path) -> None:
    pool = PromptPool(ModelConfig(path=str(tmp_path)), 1)
    with pytest.raises(EpdError, match=r"no config\.json") as caught:
        await pool.start()
    assert caught.value.param == "model.path"
    await pool.close()


async def test_loading_for_ever_is_a_typed_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lives, "LOAD_S", 0.001)
    pool = PromptPool(ModelConfig(path=path), 1)
    with pytest.raises(EpdError, match="loading the tokenizer and processor took") as caught:
        await pool.start()
    assert caught.value.kind is ErrorKind.STAGE_UNAVAILABLE
    await pool.close()


@shared_pool
async def test_a_new_process_that_loads_for_ever_is_no_fault_of_a_prompt(
    pool: PromptPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that takes a dead one's place: who asked first is told to try again."""
    before = pool.rebuilt
    child().kill()
    await until(lambda: pool.rebuilt == before + 1)
    with monkeypatch.context() as patch:
        patch.setattr(prompt_lives, "LOAD_S", 0.001)
        with pytest.raises(EpdError, match="loading the tokenizer and processor took") as caught:
            await pool.build(MESSAGES, SIZES, 4096)
    assert (caught.value.kind, caught.value.retry_after_s) == (ErrorKind.STAGE_UNAVAILABLE, 1.0)
    assert "a prompt process took too long to load" in caplog.text
    assert isinstance(await pool.build(MESSAGES, SIZES, 4096), PromptPlan)


def test_the_gateway_needs_no_torch() -> None:
    code = "import sys, gateway.main; sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0


async def test_without_processes_a_thread_does_it(path: str, builder: PromptBuilder) -> None:
    pool = PromptPool(ModelConfig(path=path), 0, builder)
    await pool.start()
    assert await pool.build(MESSAGES, SIZES, 4096) == builder.build(MESSAGES, SIZES)
    await pool.close()
