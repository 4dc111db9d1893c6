"""Traces: who asked what and when, read as a stream in bounded memory.

A `Trace` can be iterated any number of times; each pass reopens its source. What identifies a prefix
differs by format and is kept as it came: token ids, chained ids of fixed-size granules (Mooncake: 512
tokens, agentic sessions: 64), or nothing at all (length files). `pagedjax.sim.replay.BlockKeys` turns
either identity into keys of blocks of any size.
"""

from pagedjax.sim.trace.formats import FORMATS, open_trace
from pagedjax.sim.trace.reading import UNITS, Chat, Encode, Reading
from pagedjax.sim.trace.request import Trace, TraceRequest
from pagedjax.sim.trace.text import TEMPLATES
from pagedjax.sim.trace.writing import anonymous, write_anonymous, write_trace

__all__ = [
    "FORMATS",
    "TEMPLATES",
    "UNITS",
    "Chat",
    "Encode",
    "Reading",
    "Trace",
    "TraceRequest",
    "anonymous",
    "open_trace",
    "write_anonymous",
    "write_trace",
]
