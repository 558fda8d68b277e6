"""Contract tests: clients that nobody here wrote, against a gateway over scripted stages."""

from __future__ import annotations

from tests.e2e.gateway_house import empty, house, loaded  # noqa: F401 (fixtures)
from tests.e2e.test_gateway_tools import tool_model, tools  # noqa: F401 (fixtures)
