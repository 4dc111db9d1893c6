"""The host half beside the cache: requests in, plans out, results booked; it never imports jax."""

from pagedjax.engine.engine import Engine, Runner, StepRecord, StepResult, TokenScores
from pagedjax.engine.managers import make_manager
from pagedjax.engine.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
)
from pagedjax.engine.scheduler import Row, Scheduler, StepPlan

__all__ = [
    "CompletionOutput",
    "Engine",
    "FinishReason",
    "Request",
    "RequestOutput",
    "Row",
    "Runner",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "StepPlan",
    "StepRecord",
    "StepResult",
    "TokenScores",
    "make_manager",
]
