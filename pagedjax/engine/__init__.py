"""The host half beside the cache: requests in, plans out, results booked; it never imports jax."""

from pagedjax.engine.engine import Engine
from pagedjax.engine.managers import make_manager
from pagedjax.engine.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
)
from pagedjax.engine.scheduler import Scheduler
from pagedjax.engine.step import (
    Row,
    Runner,
    SequenceRecord,
    SharedPrefix,
    StepPlan,
    StepRecord,
    StepResult,
    TokenScores,
)
from pagedjax.engine.times import Seconds

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
    "Seconds",
    "Sequence",
    "SequenceRecord",
    "SharedPrefix",
    "StepPlan",
    "StepRecord",
    "StepResult",
    "TokenScores",
    "make_manager",
]
