"""A decode worker as a process: `epd decode CHECKPOINT`."""

from __future__ import annotations

from decode.service import DecodeService
from decode.worker import DecodeWorker, num_blocks
from epd.config import Config
from epd.models.lm import LanguageModel
from epd.obs import logs
from epd.rpc.jobs import ModelFacts
from epd.rpc.server import Server
from epd.runtime.context import max_context
from epd.runtime.memory import OwnedMemory
from epd.runtime.stage import serve_worker
from protos.epd.v1 import decode_pb2_grpc


async def serve(config: Config) -> None:
    """Load the language model and serve until SIGTERM.

    Raises:
        EpdError: the checkpoint can't be served, a port is taken, or the transfer
            engine can't start; the message says why.
    """
    logs.setup(config.log, DecodeWorker.stage)
    model = config.model
    lm = LanguageModel.load(
        model.path,
        dtype=model.dtype,
        device=model.device,
        exact=model.exact,
        threads=model.threads,
        block_tokens=config.kv.block_tokens,
        kernels=model.kernels,
        quantize=model.quantize_in(DecodeWorker.stage),
    )
    memory = OwnedMemory(config, lm.spec.fingerprint, max_quarantined=0)
    pool_tokens = num_blocks(config) * config.kv.block_tokens
    context = max_context(config, lm.spec, pool_tokens)
    worker = DecodeWorker(config, lm, memory, context)
    worker.warm_up()
    facts = ModelFacts(
        fingerprint=lm.spec.fingerprint,
        vocab_size=lm.spec.vocab_size,
        image_token_id=lm.spec.image_token_id,
        max_context=context,
        max_images=config.limits.max_images,
    )

    def add_service(server: Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(
            DecodeService(worker, facts, config.limits.request_deadline_s), server.grpc
        )

    await serve_worker(config, worker, "epd.v1.Decode", add_service, config.rpc.control_bytes)
