"""The greedy token of each row of logits, in one look at their bits."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from epd.models.kernels.build import Library


class BestKernel:
    """Rows [N, V] of bfloat16 logits to N ids."""

    def __init__(self, library: Library) -> None:
        self._run = library.handle.epd_best
        self._run.argtypes, self._run.restype = (c_void_p, c_int64, c_int64, c_void_p), None

    def __call__(self, logits_NV: Tensor) -> list[int]:
        """The lowest of the best ids; -1 for a row whose largest logit is not finite, or
        that has one which is no number."""
        assert logits_NV.dtype is torch.bfloat16
        assert logits_NV.is_contiguous()
        rows, n = logits_NV.shape
        best = (c_int64 * rows)()
        self._run(logits_NV.data_ptr(), rows, n, best)
        return list(best)
