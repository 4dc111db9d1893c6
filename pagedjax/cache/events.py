"""The stream of cache events, from which an outside observer can rebuild what is resident."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# (group, medium, digest) -> resident copies
Resident = dict[tuple[int, str, bytes], int]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change of what is resident.

    Attributes:
        number: Sequence number, from 0, without holes.
        kind: "stored", "removed" or "cleared" (everything, in all groups and media).
        now: Logical time.
        group: KV group; 0 for "cleared".
        medium: "device" or "host"; "all" for "cleared".
        keys: Digests, in order of position for "stored", of eviction for "removed".
        blocks: Block ids (host: slots) they are in.
        parent: "stored" on the device: digest of the block before the first one; None at the start.
        copies_left: Copies of each key that are resident in this group and medium after the event.
    """

    number: int
    kind: str
    now: float
    group: int = 0
    medium: str = "device"
    keys: tuple[bytes, ...] = ()
    blocks: tuple[int, ...] = ()
    parent: bytes | None = None
    copies_left: tuple[int, ...] = ()


@dataclass(frozen=True)
class EventSnapshot:
    """What was resident when the next event was to get number `next_number`."""

    next_number: int
    resident: Resident


@dataclass(eq=False)
class EventLog:
    """Numbers events and keeps the latest.

    A reader that has missed some (their numbers tell) takes a `snapshot` and goes on from there.

    Args:
        limit: Events kept; None: all.
    """

    limit: int | None = None
    events: deque[CacheEvent] = field(init=False)
    resident: Resident = field(default_factory=dict)
    next_number: int = 0

    def __post_init__(self) -> None:
        self.events = deque(maxlen=self.limit)

    def stored(
        self,
        now: float,
        group: int,
        medium: str,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        parent: bytes | None = None,
    ) -> None:
        """Contents became resident."""
        left = []
        for key in keys:
            name = (group, medium, key)
            self.resident[name] = self.resident.get(name, 0) + 1
            left.append(self.resident[name])
        self._add("stored", now, group, medium, tuple(keys), tuple(blocks), parent, tuple(left))

    def removed(
        self, now: float, group: int, medium: str, keys: Sequence[bytes], blocks: Sequence[int]
    ) -> None:
        """One copy of each content left."""
        left = []
        for key in keys:
            name = (group, medium, key)
            self.resident[name] -= 1
            left.append(self.resident[name])
            if not self.resident[name]:
                del self.resident[name]
        self._add("removed", now, group, medium, tuple(keys), tuple(blocks), None, tuple(left))

    def cleared(self, now: float) -> None:
        """Everything left at once."""
        self.resident.clear()
        self._add("cleared", now, 0, "all", (), (), None, ())

    def _add(self, kind: str, now: float, *fields: object) -> None:
        self.events.append(CacheEvent(self.next_number, kind, now, *fields))  # type: ignore[arg-type]
        self.next_number += 1

    def snapshot(self) -> EventSnapshot:
        """A starting point for readers that come late."""
        return EventSnapshot(self.next_number, dict(self.resident))


def replay(events: Iterable[CacheEvent], start: EventSnapshot = EventSnapshot(0, {})) -> Resident:
    """What is resident after the events, as an outside observer rebuilds it.

    Args:
        events: In order; those before the snapshot are skipped.
        start: Where to start; by default from nothing.

    Raises:
        ValueError: A number is missing, or an event contradicts what came before it.
    """
    resident, expected = dict(start.resident), start.next_number
    for event in events:
        if event.number < expected:
            continue
        if event.number > expected:
            raise ValueError(
                f"event {event.number}: {expected} is missing; take a snapshot and start from it"
            )
        expected += 1
        if event.kind == "cleared":
            resident.clear()
            continue
        step = 1 if event.kind == "stored" else -1
        for key, left in zip(event.keys, event.copies_left, strict=True):
            name = (event.group, event.medium, key)
            count = resident.get(name, 0) + step
            if count != left:
                raise ValueError(
                    f"event {event.number}: says {left} copies of {key.hex()}, there are {count}"
                )
            resident[name] = count
            if not count:
                del resident[name]
    return resident
