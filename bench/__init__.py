"""Demonstration and measurements: run from a checkout, not part of the wheel."""
