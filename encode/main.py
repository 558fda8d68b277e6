"""Encode as a part of a process: tower, pictures and memory put together."""

from __future__ import annotations

from encode.images import ImagePreparer
from encode.service import EncodeService
from encode.worker import EncodeWorker
from epd.models.encoder import VisionEncoder
from epd.rpc.jobs import ModelFacts
from epd.rpc.server import Server
from epd.runtime.resources import Resources
from epd.runtime.stage import Part
from protos.epd.v1 import encode_pb2_grpc


async def build(shared: Resources) -> Part:
    """Load the vision tower.

    Raises:
        EpdError: the checkpoint can't be served, or the transfer engine can't start;
            the message says why.
    """
    config, model = shared.config, shared.config.model
    pictures = ImagePreparer(config)  # its processes load while this one does
    encoder = VisionEncoder.load(
        model.path,
        model.dtype,
        model.device,
        exact=model.exact,
        threads=model.threads,
        kernels=model.kernels,
    )
    shared.memory.may_quarantine(config.encode.arena_mib << 19)
    worker = EncodeWorker(config, encoder, pictures, shared.memory, shared.thread)
    facts = ModelFacts.of(encoder.spec, encoder.spec.max_positions, config.limits)

    def add_service(server: Server) -> None:
        encode_pb2_grpc.add_EncodeServicer_to_server(
            EncodeService(worker, facts, config.limits.request_deadline_s), server.grpc
        )

    await pictures.start()
    return Part(worker, "epd.v1.Encode", add_service, config.rpc.encode_bytes)
