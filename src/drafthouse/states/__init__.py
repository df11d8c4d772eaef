"""Hidden states of a target: captured on the device, kept in shards, extracted by workers that may die."""

from drafthouse.states.capture import Capture
from drafthouse.states.reader import StateBatch, StateSample, StatesReader
from drafthouse.states.settings import ExtractSettings
from drafthouse.states.spec import StatesSpec, spec_of
from drafthouse.states.worker import WorkerSummary, run_worker

__all__ = [
    "Capture",
    "ExtractSettings",
    "StateBatch",
    "StateSample",
    "StatesReader",
    "StatesSpec",
    "WorkerSummary",
    "run_worker",
    "spec_of",
]
