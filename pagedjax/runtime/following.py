"""What process 0 tells the others, and what they do then: the same programs on the same arrays, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pagedjax.models.weights import leaf_of, set_leaf

if TYPE_CHECKING:
    from pagedjax.models import LoadedModel
    from pagedjax.runtime.hosts import Channel
    from pagedjax.runtime.runner import JaxRunner


class Led:
    """A program of process 0 that tells the others to run it as well, with what they do not have."""

    def __init__(self, channel: Channel, name: str, program: Any, told: slice) -> None:
        self._channel, self._name, self._program, self._told = channel, name, program, told

    def __call__(self, *args: Any) -> Any:
        self._channel.tell((self._name, *args[self._told]))
        return self._program(*args)

    def _cache_size(self) -> int:
        count: int = self._program._cache_size()
        return count


def follow(runner: JaxRunner, channel: Channel, sample: str, load: Callable[[str], LoadedModel]) -> None:
    """Do what process 0's devices do until it ends. Where something fails here, process 0 ends as well.

    Args:
        runner: Of the same model and settings.
        channel: To process 0.
        sample: Digest of a sample of the model that was read here (`LoadedModel.sample`).
        load: Given its source, another model, its weights where they belong.

    Raises:
        ValueError: Process 0 read another model.
    """
    try:
        _follow(runner, channel, sample, load)
    except BaseException as error:
        channel.abandon(error)
        raise


def _follow(runner: JaxRunner, channel: Channel, sample: str, load: Callable[[str], LoadedModel]) -> None:
    out: Any = None
    tokens: Any = None
    given: dict[str, Any] = {}  # leaves of new weights that process 0 deals out
    while True:
        kind, *rest = channel.next()
        if kind == "stop":
            return
        if kind == "step":
            bucket, batch, grouped = rest
            out = runner._dispatch(bucket, batch, grouped)
            tokens, sampling = out.tokens, batch.sampling
        elif kind == "several":
            runner._dispatch_several(*rest)
        elif kind == "copies":
            runner.run_copies(*rest)
        elif kind == "draw":
            tokens = runner._asked.draw(out.logits, sampling, *rest)
        elif kind == "score":
            runner._asked.score(out.logits, tokens)
        elif kind == "prompt":
            runner.prompt_scores._score(runner._params, out.hidden, *rest)
        elif kind == "warm copies":
            runner.pools = runner.copies.warm_up(runner.pools)
        elif kind == "read":
            group, ids = rest
            channel.answer(runner.copies.read(runner.pools[group], ids))
        elif kind == "write":
            runner.put_blocks(*rest)
        elif kind == "leaf":
            (path,) = rest
            channel.answer(runner.place.own_part(path, leaf_of(runner._params, path)))
        elif kind == "part":
            path, shape, parts = rest
            set_leaf(given, path, runner.place.join(path, shape, parts))
        elif kind == "tie":
            path, other = rest
            set_leaf(given, path, leaf_of(given, other))
        elif kind == "weights":
            (read,) = rest
            if read is not None:
                source, theirs = read
                loaded = load(source)
                _check_same(source, theirs, loaded.sample)
                given = loaded.params
            runner.update_weights(given)
            given = {}
        elif kind == "model":
            source, theirs = rest
            _check_same(source, theirs, sample)
        else:
            raise RuntimeError(
                f"hosts: message {kind!r}: not known here; start all processes with one version"
            )


def _check_same(source: str, theirs: str, ours: str) -> None:
    if ours != theirs:
        raise ValueError(
            f"model={source}: process 0 read another model there; give all processes the same files"
        )
