"""An encode worker as a process: `epd encode CHECKPOINT`."""

from __future__ import annotations

from encode.images import ImagePreparer
from encode.service import EncodeService
from encode.worker import EncodeWorker
from epd.config import Config
from epd.models.encoder import VisionEncoder
from epd.obs import logs
from epd.rpc.jobs import ModelFacts
from epd.rpc.server import Server
from epd.runtime.memory import OwnedMemory
from epd.runtime.stage import serve_worker
from protos.epd.v1 import encode_pb2_grpc


async def serve(config: Config) -> None:
    """Load the vision tower and serve until SIGTERM.

    Raises:
        EpdError: the checkpoint can't be served, a port is taken, or the transfer
            engine can't start; the message says why.
    """
    logs.setup(config.log, EncodeWorker.stage)
    model = config.model
    pictures = ImagePreparer(config)  # its processes load while this one does
    encoder = VisionEncoder.load(
        model.path,
        model.dtype,
        model.device,
        exact=model.exact,
        threads=model.threads,
        kernels=model.kernels,
    )
    memory = OwnedMemory(config, encoder.spec.fingerprint, config.encode.arena_mib << 19)
    worker = EncodeWorker(config, encoder, pictures, memory)
    facts = ModelFacts(
        fingerprint=encoder.spec.fingerprint,
        vocab_size=encoder.spec.vocab_size,
        image_token_id=encoder.spec.image_token_id,
        max_context=encoder.spec.max_positions,
        max_images=config.limits.max_images,
    )

    def add_service(server: Server) -> None:
        encode_pb2_grpc.add_EncodeServicer_to_server(
            EncodeService(worker, facts, config.limits.request_deadline_s), server.grpc
        )

    await pictures.start()
    await serve_worker(config, worker, "epd.v1.Encode", add_service, config.rpc.encode_bytes)
