"""Prefill as a part of a process: model and memory put together."""

from __future__ import annotations

from epd.jobs import Stage
from epd.rpc.jobs import ModelFacts
from epd.rpc.server import Server
from epd.runtime.context import max_context
from epd.runtime.kv import num_blocks
from epd.runtime.resources import Resources
from epd.runtime.stage import Part
from prefill.service import PrefillService
from prefill.worker import PrefillWorker
from protos.epd.v1 import prefill_pb2_grpc


async def build(shared: Resources) -> Part:
    """Put the worker together; loads the language model if nobody did.

    Raises:
        EpdError: the checkpoint can't be served, or the transfer engine can't start;
            the message says why.
    """
    config, lm, memory = shared.config, shared.lm, shared.memory
    pool_bytes = num_blocks(config, Stage.PREFILL) * lm.kv_layout.block_bytes
    memory.may_quarantine(pool_bytes // 2)
    context = max_context(config, lm.spec)
    worker = PrefillWorker(config, lm, memory, shared.kv, context, shared.thread)
    worker.warm_up()
    facts = ModelFacts.of(lm.spec, context, config.limits)

    def add_service(server: Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(
            PrefillService(worker, facts, config.limits.request_deadline_s), server.grpc
        )

    return Part(worker, "epd.v1.Prefill", add_service, config.rpc.control_bytes)
