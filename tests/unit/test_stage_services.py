"""What the servicers of all stages do alike, without a worker behind them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from decode.service import DecodeService
from encode.service import EncodeService
from epd.errors import EpdError, ErrorKind
from prefill.service import PrefillService
from tests.waiting import LIMIT_S


class Silent:
    """A peer that opened a stream, without a deadline, and says nothing."""

    def time_remaining(self) -> None:
        return None

    async def read(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("service", [EncodeService, PrefillService, DecodeService])
async def test_a_stream_without_a_job_ends(service: Any) -> None:
    made = service(None, None, 0.05)
    with pytest.raises(EpdError) as caught:
        await asyncio.wait_for(made.Run(None, Silent()), LIMIT_S)
    assert caught.value.kind is ErrorKind.DEADLINE_EXCEEDED
