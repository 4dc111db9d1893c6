"""Links are shared fairly; what lands is visible only once it is written; a store sinks and forgets in order."""

import numpy as np
import pytest

from pagedjax.cache import PagedManager, TokenChain
from pagedjax.sim.transfer import Landing, Link, Network, Place, Store


def _run(network: Network, until: float = np.inf) -> None:
    while network.next_s <= until and network.next_s < np.inf:
        network.advance(network.next_s)


def test_one_transfer_takes_its_start_and_its_bytes() -> None:
    network, ends = Network(), []
    network.start([Link("a", 100.0, 0.5)], 200, 1.0, ends.append)
    _run(network)
    assert ends == [1.0 + 0.5 + 2.0]
    assert (network.sent_bytes, network.received_bytes, network.lost_bytes) == (200, 200, 0)


def test_two_share_and_the_rest_speeds_up() -> None:
    """100 bytes and 300 over 100 a second: both at half speed for 2 s, then the longer alone."""
    network, ends = Network(), {}
    link = Link("a", 100.0)
    for name, size in (("short", 100), ("long", 300)):
        network.start([link], size, 0.0, lambda at, name=name: ends.update({name: at}))
    _run(network)
    assert ends == {"short": 2.0, "long": 4.0}
    assert link.moved_bytes == 400 and not link.flows


def test_shares_are_max_min_fair() -> None:
    """Bertsekas and Gallager's chain: what is held back at a narrow link leaves its share of the wide one to others."""
    network = Network()
    wide, narrow = Link("wide", 100.0), Link("narrow", 20.0)
    transfers = [
        network.start(path, 1000, 0.0, lambda at: None) for path in ([wide], [wide, narrow], [narrow], [wide])
    ]
    network.advance(0.0)
    assert [t.rate for t in transfers] == [45.0, 10.0, 10.0, 45.0]
    # Nobody could be faster without a slower one becoming slower: each crosses a full link where it is the fastest.
    for transfer in transfers:
        full = [
            link
            for link in transfer.path
            if sum(f.rate for f in link.flows.values()) >= link.bytes_per_s - 1e-9
        ]
        assert any(transfer.rate >= max(f.rate for f in link.flows.values()) - 1e-9 for link in full)


def test_random_shares_fill_no_link_beyond_its_width() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        network = Network(log_rates=True)
        links = [Link(f"l{i}", float(rng.integers(10, 100)), float(rng.random() / 10)) for i in range(5)]
        done: list[float] = []
        for _ in range(12):
            path = [links[i] for i in rng.permutation(5)[: int(rng.integers(1, 4))]]
            network.start(path, int(rng.integers(1, 500)), float(rng.random()), done.append)
        while network.next_s < np.inf:
            network.advance(network.next_s)
            for link in links:
                assert sum(f.rate for f in link.flows.values()) <= link.bytes_per_s * (1 + 1e-9)
        assert len(done) == 12 and done == sorted(done)
        assert network.sent_bytes == network.received_bytes


def test_what_is_cancelled_is_lost_as_far_as_it_had_moved() -> None:
    network, ends = Network(), []
    link = Link("a", 100.0)
    first = network.start([link], 1000, 0.0, ends.append)
    network.start([link], 100, 0.0, ends.append)
    network.advance(0.0)
    network.cancel(first, 1.0)  # 50 bytes each
    network.cancel(first, 1.0)
    _run(network)
    assert ends == [1.5]
    assert (network.sent_bytes, network.received_bytes, network.lost_bytes) == (150, 100, 50)
    never = network.start([link], 100, 9.0, ends.append)
    network.cancel(never, 9.0)
    assert network.lost_bytes == 50 and network.next_s == np.inf


def test_nothing_to_send_takes_no_time() -> None:
    network, ends = Network(), []
    network.start([Link("a", 100.0, 5.0)], 0, 1.0, ends.append)
    network.start([], 10, 2.0, ends.append)
    assert network.expected_s([], 10) == network.expected_s([Link("b", 1.0, 1.0)], 0) == 0.0
    _run(network)
    assert ends == [1.0, 2.0]


def test_what_landed_is_written_before_it_is_seen() -> None:
    """Landed blocks are in no index until their request is admitted; then they are hit like any others."""
    manager = PagedManager(num_blocks=12, block_size=4)
    landing = Landing(manager)
    chain = TokenChain(range(19), block_size=4)
    digests = chain.digests(4)[:4]
    landing.add(list(digests))
    assert not manager.resident() and manager.peek(chain) == 0
    hit = manager.begin(0, chain)
    assert hit.num_tokens == 16 and len(manager.resident()) == 4
    assert manager.stats.requests == 0  # bringing in is no request
    assert manager.reserve(0, 3)
    manager.commit(0, 19, 1.0)
    landing.drop(list(digests))
    assert landing.is_empty
    manager.release(0)
    manager.check_invariants()
    assert manager.num_free == manager.num_usable


def test_what_landed_waits_where_there_is_no_room() -> None:
    manager = PagedManager(num_blocks=6, block_size=4)
    landing = Landing(manager)
    other = TokenChain(range(100, 112), block_size=4)
    manager.begin(1, other)
    assert manager.reserve(1, 12)
    chain = TokenChain(range(13), block_size=4)
    landing.add(chain.digests(3)[:3])
    assert manager.begin(0, chain).num_tokens == 0 and not landing.is_empty
    manager.release(0)
    manager.release(1)
    assert manager.begin(0, chain).num_tokens == 12
    manager.check_invariants()


def _names(count: int, start: int = 0) -> list[bytes]:
    return [bytes([start + i]) for i in range(count)]


def test_a_store_sinks_to_disk_and_forgets_tails_first() -> None:
    store = Store(3, 2)
    store.join("a")
    assert store.put("a", _names(3)) == 0
    assert store.put("a", _names(2, 10)) == 2  # two of the first chain sink: its tail, and what came before
    assert store.find("a", _names(3)) == [Place("a", "memory"), Place("a", "disk"), Place("a", "disk")]
    assert (store.num_blocks("memory"), store.num_blocks("disk")) == (3, 2)
    assert store.put("a", _names(1, 20)) == 1
    assert store.find("a", _names(3)) == [Place("a", "disk"), Place("a", "disk")]
    assert store.missing("a", [*_names(3), b"new"]) == [bytes([2]), b"new"]
    store.leave("a")
    assert store.find("a", _names(3)) == [] and store.put("a", _names(1)) == 0


def test_a_pool_reads_all_nodes_and_prefers_its_own() -> None:
    pool, apart = Store(4, pooled=True), Store(4)
    for store in (pool, apart):
        store.join("a")
        store.join("b")
        store.put("a", _names(2))
    assert pool.find("b", _names(2)) == [Place("a", "memory")] * 2 and apart.find("b", _names(2)) == []
    assert pool.missing("b", _names(2)) == [] and apart.missing("b", _names(2)) == _names(2)
    pool.touch("b", _names(1))
    pool.put("a", _names(3, 10))
    assert pool.find("b", _names(2)) == [Place("a", "memory")]  # the touched one stayed


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link("a", 0.0), "a: bytes_per_s=0.0: must be positive"),
        (lambda: Link("a", 1.0, -1.0), "start_s=-1.0"),
        (lambda: Store(0), "memory_blocks=0: must be at least 1"),
        (lambda: Store(1, -1), "disk_blocks=-1"),
    ],
)
def test_bad_links_and_stores_are_named(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()
