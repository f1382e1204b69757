"""The metrics of the front and of all replicas as one text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from headway.base.dataclass import dataclass


def merged_metrics(texts: list[tuple[str, bytes]]) -> bytes:
    """Metrics of several processes as one text; each sample says which replica it is of."""
    families: dict[str, Metric] = {}
    for replica, text in texts:
        for family in text_string_to_metric_families(text.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                merged.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(families.values())))
    return generate_latest(registry)


@dataclass(eq=False)
class _Families:
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families
