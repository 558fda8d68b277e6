"""What a metric of this process says now."""

from __future__ import annotations

from prometheus_client.metrics import MetricWrapperBase


def reading(metric: MetricWrapperBase) -> float:
    """Of a counter or gauge; one with labels is given with their values (`labels`)."""
    (family,) = metric.collect()
    return family.samples[0].value
