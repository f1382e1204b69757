"""The step: passes are scheduled, packed into a batch, run on the device and read out."""

from headway.runtime.passes import Feed, Pass, PassResult, PassStats, Readout

__all__ = ["Feed", "Pass", "PassResult", "PassStats", "Readout"]
