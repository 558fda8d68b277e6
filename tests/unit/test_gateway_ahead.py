"""Which calls that were opened ahead of their jobs are good for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd.jobs import Stage
from gateway.ahead import Ahead


class Stages:
    """One worker, and the calls to it."""

    def __init__(self) -> None:
        self.worker: Any = SimpleNamespace(draining=False)
        self.registry = SimpleNamespace(only=lambda stage: self.worker)
        self.opened: list[Any] = []

    def open(self, stage: Stage, worker: Any, deadline: float, request_id: str) -> Any:
        stream = SimpleNamespace(worker=worker, ended=False, lost=False, aborted=0)
        stream.abort = lambda: setattr(stream, "aborted", stream.aborted + 1)
        self.opened.append(stream)
        return stream


@pytest.fixture
def stages() -> Stages:
    return Stages()


def ahead_of(stages: Any) -> Ahead:
    return Ahead(stages, 1.0, "r")


def test_a_call_is_taken_once_and_is_not_given_up_then(stages: Stages) -> None:
    ahead = ahead_of(stages)
    ahead.open(Stage.PREFILL)
    (stream,) = stages.opened
    assert ahead.take(Stage.DECODE, stages.worker) is None
    taken: Any = ahead.take(Stage.PREFILL, stages.worker)
    assert taken is stream
    assert ahead.take(Stage.PREFILL, stages.worker) is None
    assert ahead.close() == []
    assert taken.aborted == 0


@pytest.mark.parametrize("how", ["another", "draining", "ended", "lost"])
def test_one_that_is_not_good_any_more_is_given_up_at_once(stages: Stages, how: str) -> None:
    """Its request may take long, and nobody will come for it."""
    ahead = ahead_of(stages)
    ahead.open(Stage.PREFILL)
    (stream,) = stages.opened
    worker = stages.worker
    if how == "another":
        worker = SimpleNamespace(draining=False)
    elif how == "draining":
        worker.draining = True
    else:
        setattr(stream, how, True)
    assert ahead.take(Stage.PREFILL, worker) is None
    assert stream.aborted == 1
    assert ahead.take(Stage.PREFILL, stages.worker) is None
    assert ahead.close() == [stream]
    assert ahead.close() == []
    assert stream.aborted == 1


def test_what_was_wanted_or_given_up_before_is_not_opened(stages: Stages) -> None:
    ahead = ahead_of(stages)
    ahead.take(Stage.PREFILL, stages.worker)
    ahead.open(Stage.PREFILL)
    ahead.close()
    ahead.open(Stage.ENCODE)
    assert stages.opened == []


def test_a_stage_has_one_call_at_most_and_none_where_there_is_a_choice(stages: Stages) -> None:
    ahead = ahead_of(stages)
    ahead.open(Stage.ENCODE)
    ahead.open(Stage.ENCODE)
    assert len(stages.opened) == 1
    stages.worker = None
    ahead.open(Stage.PREFILL)
    assert len(stages.opened) == 1
