"""The suites that plug-ins are checked by, over all that is built in."""

from pagedjax.cache import INDEXES, POLICIES
from pagedjax.cache.policies import Belady
from pagedjax.cache.verified_index import VerifiedHashIndex
from pagedjax.testing import IndexSuite, PolicySuite, installed

globals().update({name: suite for name, suite in vars(installed).items() if name.startswith("Test")})


class TestBelady(PolicySuite):
    policy = lambda num_blocks: Belady(num_blocks, {b"7": [10.0, 50.0], b"9": [200.0]})  # noqa: E731


class TestVerified(IndexSuite):
    index = VerifiedHashIndex


def test_every_name_has_its_suite():
    policies = {vars(suite)["policy"] for name, suite in globals().items() if name.startswith("TestPolicy")}
    indexes = {vars(suite)["index"] for name, suite in globals().items() if name.startswith("TestIndex")}
    assert policies == POLICIES.keys() - {"belady"} and indexes == INDEXES.keys()
