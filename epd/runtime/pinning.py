"""Page-locked host memory, so that a CUDA device copies to and from it at full speed."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def pin(memory: Tensor, device: str | torch.device) -> None:
    """Page-lock memory that lives as long as the process; nothing for a CPU.

    Where the system refuses (its limit of locked memory), copies are slower and no other
    thing changes: a line in the log says so.
    """
    if torch.device(device).type != "cuda":
        return
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        logger.warning("host memory is not page-locked", extra={"cuda_error": code})
