"""The host-memory tier behind the pool: evicted contents that may come back, and swapped sequences.

Only bookkeeping: which host block holds what. The bytes move when the runner executes the CopyPlan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pagedjax.cache.protocol import InvariantError


class HostTier:
    """Host blocks of one KV group: a bounded LRU of evicted contents, shared with swapped sequences.

    Ids count from 0: the host has no null block. A slot that a pending copy still reads is neither evicted
    nor handed out until `settle`.

    Args:
        num_blocks: Host blocks; 0 keeps nothing.

    Attributes:
        on_stored: Told of each content that became resident here, and of its slot.
        on_removed: Told of each content that left.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"host_blocks={num_blocks}: must be 0 (no host tier) or positive")
        self.num_blocks = num_blocks
        self.version = 0  # grows whenever a content leaves
        self._free = list(range(num_blocks - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # by name, least recently used first
        self._digests: dict[int, bytes] = {}  # slot -> digest, what is reported
        self._reading: dict[int, int] = {}
        self._returning: list[int] = []  # private slots given back while a copy still reads them
        self._private: set[int] = set()
        self.on_stored: Callable[[bytes, int], None] | None = None
        self.on_removed: Callable[[bytes, int], None] | None = None

    def __len__(self) -> int:
        """Contents resident here."""
        return len(self._slot_of)

    def contents(self) -> list[bytes]:
        """Digests of what is resident here."""
        return [self._digests[slot] for slot in self._slot_of.values()]

    def find(self, name: bytes) -> int:
        """The slot that holds a content, or -1; changes nothing."""
        return self._slot_of.get(name, -1)

    def store(self, name: bytes, digest: bytes) -> int:
        """A content leaves the device: the slot to copy it to, or -1 if it is here or finds no room.

        Args:
            name: What it is found by; equal to the digest unless digests are not to be trusted.
            digest: What is reported.
        """
        if name in self._slot_of:
            self._slot_of.move_to_end(name)
            return -1
        slot = self._take_slot()
        if slot >= 0:
            self._slot_of[name] = slot
            self._digests[slot] = digest
            if self.on_stored is not None:
                self.on_stored(digest, slot)
        return slot

    def read(self, name: bytes) -> int:
        """The slot of a resident content, about to be copied back; kept until `settle`."""
        slot = self._slot_of[name]
        self._slot_of.move_to_end(name)
        self._reading[slot] = self._reading.get(slot, 0) + 1
        return slot

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        for name, slot in self._slot_of.items():
            if slot not in self._reading:
                self._drop(name)
                return slot
        return -1

    def _drop(self, name: bytes) -> None:
        slot = self._slot_of.pop(name)
        digest = self._digests.pop(slot)
        self.version += 1
        if self.on_removed is not None:
            self.on_removed(digest, slot)

    # ------------------------------------------------------ swapped sequences

    @property
    def num_available(self) -> int:
        """Slots a swap could take, cached contents given up."""
        busy = sum(slot in self._reading for slot in self._slot_of.values())
        return len(self._free) + len(self._slot_of) - busy

    def take_private(self, count: int) -> list[int]:
        """Slots for a swapped sequence. The caller has checked `num_available`."""
        slots = [self._take_slot() for _ in range(count)]
        if -1 in slots:
            raise InvariantError(f"host tier: {count} slots promised, {slots.count(-1)} missing")
        self._private.update(slots)
        return slots

    def give_back(self, slots: list[int], *, read: bool) -> None:
        """Private slots are free again: at once, or, where a pending copy reads them, with `settle`."""
        self._private.difference_update(slots)
        if read:
            self._returning += slots
        else:
            self._free += slots

    def settle(self) -> None:
        """All pending copies have been handed out."""
        self._reading.clear()
        self._free += self._returning
        self._returning = []

    def lose(self, slots: set[int]) -> None:
        """What was to be copied to these slots may not be there: contents in them are gone."""
        for name in [name for name, slot in self._slot_of.items() if slot in slots]:
            self._free.append(self._slot_of[name])
            self._drop(name)

    def clear(self) -> int:
        """Drop every content; slots of swapped sequences stay. Returns how many contents went."""
        count = len(self._slot_of)
        self._free += self._slot_of.values()
        self._slot_of.clear()
        self._digests.clear()
        self.version += 1
        return count

    def check(self) -> None:
        """Raise InvariantError unless every slot is in exactly one state."""
        slots = [*self._free, *self._slot_of.values(), *self._private, *self._returning]
        if sorted(slots) != list(range(self.num_blocks)):
            raise InvariantError(
                f"host slots: free {self._free}, cached {self._slot_of}, private {self._private}, "
                f"returning {self._returning} of {self.num_blocks}"
            )
