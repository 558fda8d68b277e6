"""Everything here needs a CUDA device; without one it is skipped, and counted as such."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
