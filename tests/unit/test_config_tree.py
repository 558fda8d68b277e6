"""The configuration: precedence, names in errors, and that children see what the parent saw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.child import child_environment, command_line
from epd.config import Config
from epd.config_sources import load_config
from epd.errors import EpdError


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[prefill]\nstep_tokens = 1\nchunk_tokens = 1\nmax_queue = 1\n")
    environ = {"EPD_PREFILL__STEP_TOKENS": "2", "EPD_PREFILL__CHUNK_TOKENS": "2"}
    config = load_config(file, {"prefill.step_tokens": 3}, environ)
    prefill = config.prefill
    assert (prefill.step_tokens, prefill.chunk_tokens, prefill.max_queue) == (3, 2, 1)


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[kv]\nblock_tokens = 4\n")
    assert load_config(environ={"EPD_CONFIG": str(file)}).kv.block_tokens == 4


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"kv.block_tokens": 0}, "kv.block_tokens"),
        ({"kv.nothing": 1}, "kv.nothing"),
        ({"decode.cpus": "0-"}, "decode.cpus"),
        ({"nothing.at_all": 1}, "nothing"),
        ({"model": "x", "model.path": "y"}, "model"),
        ({"gateway.http_port": 65536}, "gateway.http_port"),
        ({"log.level": "loud"}, "log.level"),
        ({"limits.request_deadline_s": "inf"}, "limits.request_deadline_s"),
        ({"gateway.http_port": True}, "gateway.http_port"),
        ({"gateway.cpus": "9-3"}, "gateway.cpus"),
        ({"fetch.ports": "80,65536"}, "fetch.ports.1"),
        ({"fetch.hosts": "https://a.example"}, "fetch.hosts"),
        ({"fetch.hosts": "a.example/pictures"}, "fetch.hosts"),
        ({"gateway.cors_origins": "https://a.example/"}, "gateway.cors_origins"),
        ({"gateway.cors_origins": "a.example"}, "gateway.cors_origins"),
        ({"gateway.api_keys": "sk-\u00e9"}, "gateway.api_keys"),
        ({"gateway.api_keys": ""}, "gateway.api_keys"),
        ({"gateway.api_keys": " , "}, "gateway.api_keys"),
        ({"gateway.api_keys": ("", "sk-1")}, "gateway.api_keys"),
        ({"gateway.api_keys": ("sk,1",)}, "gateway.api_keys"),
        ({"limits.max_top_logprobs": 257}, "limits.max_top_logprobs"),
        ({"transfer.port_min": 65536}, "transfer.port_min"),
        ({"transfer.port_min": 18000}, "transfer"),
        ({"model.threads": 100_000}, "model.threads"),
        ({"decode.threads": 100_000}, "decode.threads"),
        ({"gateway.preprocess_workers": 2_000}, "gateway.preprocess_workers"),
        ({"serve.encode": 2_000}, "serve.encode"),
        ({"gateway.host": "a" * 70}, "gateway.host"),
        ({"worker.host": "a\0b"}, "worker.host"),
        ({"transfer.host": "a b"}, "transfer.host"),
        ({"gateway.host": ""}, "gateway.host"),
        ({"gateway.metrics_host": ""}, "gateway.metrics_host"),
        ({"worker.host": ""}, "worker.host"),
        ({"transfer.host": ""}, "transfer.host"),
    ],
)
def test_a_wrong_key_or_value_is_named(flags: dict[str, object], named: str) -> None:
    with pytest.raises(EpdError) as caught:
        load_config(None, flags, {})
    assert caught.value.param == named
    assert named in caught.value.message


def numbers() -> Iterator[tuple[str, float]]:
    """Every key with a number, and its default."""
    for section, values in Config().model_dump().items():
        for key, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield f"{section}.{key}", value


@pytest.mark.parametrize(("key", "default"), numbers())
def test_a_number_that_nothing_can_count_is_named(key: str, default: float) -> None:
    """Else gRPC, torch or a socket would end on it, far from here and without a name."""
    for value in ("9" * 30, 1 << 31):
        with pytest.raises(EpdError) as caught:
            load_config(None, {key: value}, {})
        assert caught.value.param == key
    if isinstance(default, float):
        with pytest.raises(EpdError, match=key):
            load_config(None, {key: 1e300}, {})


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("[kv\n")
    with pytest.raises(EpdError, match=r"broken\.toml"):
        load_config(file, None, {})


def test_a_file_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes('model.name = "caf\u00e9"'.encode("latin-1"))
    with pytest.raises(EpdError, match=r"latin\.toml"):
        load_config(file, None, {})


def test_a_refused_key_is_not_shown() -> None:
    with pytest.raises(EpdError) as caught:
        load_config(None, {"gateway.api_keys": "sk-secr\u00e9t"}, {})
    assert "secr" not in caught.value.message


def test_hosts_and_origins_as_they_are_written() -> None:
    hosts = "a.example,*.b.example:81,127.0.0.1:8080,[::1],[2001:db8::1]:443"
    origins = "*,https://a.example,http://127.0.0.1:3000"
    config = load_config(None, {"fetch.hosts": hosts, "gateway.cors_origins": origins}, {})
    assert config.fetch.hosts == tuple(hosts.split(","))
    assert config.gateway.cors_origins == tuple(origins.split(","))


def test_the_tree_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().kv.block_tokens = 1  # type: ignore[misc]


def test_gateways_from_a_string() -> None:
    config = load_config(None, {"worker.gateways": "a:1,b:2"}, {})
    assert config.worker.gateways == ("a:1", "b:2")


def test_a_child_gets_the_whole_configuration_whatever_its_source(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[kv]\nblock_tokens = 4\n")
    flags = {
        "model.exact": True,
        "worker.gateways": "a:1,b:2",
        "fetch.hosts": "a.example,*.b.example:81",
        "model.path": "/m",
        "model.name": "",
    }
    config = load_config(file, flags, {"EPD_LOG__LEVEL": "debug"})
    stale = {"EPD_KV__BLOCK_TOKENS": "99", "EPD_CONFIG": "/gone.toml", "PATH": "/bin"}
    environ = child_environment(config, stale)
    assert environ["PATH"] == "/bin"
    assert load_config(None, None, environ) == config


def test_a_missing_secret_opens_no_gateway(tmp_path: Path) -> None:
    with pytest.raises(EpdError, match="holds no key"):
        load_config(None, None, {"EPD_GATEWAY__API_KEYS": ""})
    file = tmp_path / "c.toml"
    file.write_text("[gateway]\napi_keys = []\n")
    open_to_all = load_config(file, None, {})
    assert load_config(None, None, child_environment(open_to_all, {})) == open_to_all


def test_settings_of_one_child_are_flags() -> None:
    command = command_line("encode", {"worker.port": "1", "log.level": "error"})
    assert command[3:] == ["encode", "--set", "worker.port=1", "--set", "log.level=error"]
