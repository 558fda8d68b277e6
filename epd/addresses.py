"""Addresses as text."""

from __future__ import annotations


def joined(host: str, port: int) -> str:
    """ "host:port", an IPv6 host in brackets: what `worker.gateways`, gRPC and URLs take."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
