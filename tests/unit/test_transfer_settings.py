"""Mooncake's environment is set on purpose, and what is missing is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from epd.config import TransferConfig
from epd.transfer.settings import NEVER, TUNING, apply_environment, explain_import_error


def applied(before: dict[str, str] | None = None, **config: object) -> dict[str, str]:
    environ = dict(before or {})
    apply_environment(TransferConfig.model_validate(config), environ)
    return environ


def test_what_breaks_promises_is_removed_even_if_the_operator_set_it() -> None:
    environ = applied(dict.fromkeys(NEVER, "1"))
    assert not NEVER.keys() & environ.keys()
    assert {"MC_LOG_DIR", "MC_TCP_PROTO"} <= NEVER.keys()


def test_what_promises_rest_on_replaces_what_was_set() -> None:
    environ = applied({"MC_TCP_PROGRESS_TIMEOUT_SEC": "600"}, read_deadline_s=2.5)
    assert environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == environ["MC_TCP_STATUS_TIMEOUT_SEC"] == "3"


def test_tuning_leaves_the_operator_the_last_word() -> None:
    environ = applied({"MC_LOG_LEVEL": "INFO"})
    assert environ["MC_LOG_LEVEL"] == "INFO"
    assert environ["MC_TCP_LANES_PER_PEER"] == TUNING["MC_TCP_LANES_PER_PEER"] == "16"


def test_protocol_decides_the_transport_variable() -> None:
    assert applied(protocol="tcp")["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_TCP" not in applied({"MC_FORCE_TCP": "1"}, protocol="rdma")


def test_port_range_is_respected() -> None:
    environ = applied(port_min=18000, port_max=18010)
    assert (environ["MC_MIN_RPC_PORT"], environ["MC_MAX_RPC_PORT"]) == ("18000", "18010")
    assert "MC_MIN_RPC_PORT" not in applied()


def test_one_end_of_the_port_range_is_respected() -> None:
    """The wall and the firewall go by both ends; Mooncake alone must not go its own way."""
    environ = applied(port_max=15100)
    assert (environ["MC_MIN_RPC_PORT"], environ["MC_MAX_RPC_PORT"]) == ("15000", "15100")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "pip install 'epd[cpu]'"),
        (ImportError("libcudart.so.12: cannot open shared object file"), "pip install 'epd[cpu]'"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install lib"),
        (ImportError("undefined symbol: x"), "exactly one of 'epd[cpu]', 'epd[cuda]'"),
    ],
)
def test_import_errors_say_what_to_install(error: ImportError, advice: str) -> None:
    explained = explain_import_error(error)
    assert advice in explained.message
    assert str(error) in explained.message


def test_nothing_heavy_is_imported_before_an_engine_starts() -> None:
    script = (
        "import sys; import epd.transfer.engine, epd.transfer.arena, epd.transfer.lease;"
        "from epd.config import TransferConfig;"
        "epd.transfer.engine.Engine(TransferConfig(), 'f', 1);"
        "heavy = {'torch', 'mooncake', 'transformers'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
