"""LLM: a model, its tokenizer and an engine over a paged, prefix-shared KV cache, in one object."""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedjax.cache import EventLog, ExtraKeys, PagedManager, ReservationManager, ResetReport, TokenChain
from pagedjax.config import Config
from pagedjax.engine import Engine, StepRecord
from pagedjax.engine.managers import make_manager
from pagedjax.engine.request import RequestOutput, SamplingParams, check_token_ids
from pagedjax.paths import user_cache_dir
from pagedjax.progress import bar

if TYPE_CHECKING:
    from pagedjax.models import LoadedModel
    from pagedjax.report.record import Recorder
    from pagedjax.runtime.hosts import Hosts
    from pagedjax.runtime.snapshot import Owner

_DEFAULT_MAX_MODEL_LEN = 2048
Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """Load a model and decode with it.

    Args:
        model: Overrides `config.model.model` where given.
        config: All settings; None takes the defaults.
        progress: Show downloads, loading and generation on stderr.
        cache_dir: Where models and compiled programs are kept; None is the user's cache folder.
        on_compile: Called with a bucket before its step is compiled (seconds each, once per machine).
        on_step: Called with each step's `StepRecord`, between two steps: it may add and abort requests.
        hosts: The processes of a run on several hosts. On process 0 the object is used as on one; the others call
            `follow`, once.
        **settings: `section.key` settings with the dot written as two underscores, for example
            `cache__block_size=32`.

    Attributes:
        events: The cache's log of what became resident and what left (`cache.event_log` keeps the latest of
            them); None where it is off.
        overlap: Whether steps are planned while one runs, and why.

    Raises:
        ValueError: A setting is out of its range, the model cannot be read, or the pool does not fit.

    Example:
        >>> llm = LLM("smollm2-135m")                                    # doctest: +SKIP
        >>> llm.generate(["The capital of France is"])[0].outputs[0].text  # doctest: +SKIP
        ' Paris.'
    """

    def __init__(
        self,
        model: str | None = None,
        config: Config | None = None,
        *,
        progress: bool = True,
        cache_dir: str | Path | None = None,
        on_compile: Callable[[Any], None] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        hosts: Hosts | None = None,
        **settings: Any,
    ) -> None:
        changes = {name.replace("__", "."): value for name, value in settings.items()}
        if model is not None:
            changes["model.model"] = model
        if not isinstance(config, Config | None):
            raise ValueError(f"config={config!r}: must be a Config; try load_config('file.toml') or keywords")
        config = (config or Config()).replace(changes)
        _check_names(config)
        self.cache_dir = Path(cache_dir) if cache_dir else user_cache_dir()
        self.progress = progress
        self.config = config
        # Heavy imports wait until a model is really wanted.
        from pagedjax.runtime.hosts import join
        from pagedjax.runtime.mesh import check_devices
        from pagedjax.runtime.settings import own_settings
        from pagedjax.runtime.tuning import read_tuning

        self._tuning = read_tuning(config.runtime.kernel_tuning)
        self._channel = None if hosts is None else join(hosts, config.digest())
        try:
            _keep_compiled_programs(config.runtime.compilation_cache_dir, self.cache_dir)
            check_devices(config.runtime.tensor_parallel)
            with own_settings():
                self._build(on_compile, on_step)
        except BaseException as error:
            if self._channel is not None:  # the others would wait for this process
                self._channel.abandon(error)
            raise

    def _build(
        self, on_compile: Callable[[Any], None] | None, on_step: Callable[[StepRecord], None] | None
    ) -> None:
        from pagedjax.engine.limits import check_num_steps, choose_overlap
        from pagedjax.kernels import native, products
        from pagedjax.kernels.layout import device_class
        from pagedjax.runtime import JaxRunner
        from pagedjax.runtime.mesh import make_place
        from pagedjax.runtime.pools import check_memory, plan_pools

        config = self.config
        _check_int8(config)
        check_num_steps(config)
        self.overlap = choose_overlap(config, device_class())
        loaded = self._load(config.model.model)
        self.tokenizer = loaded.tokenizer
        length = config.model.max_model_len or min(loaded.config.max_model_len, _DEFAULT_MAX_MODEL_LEN)
        if length > loaded.config.longest_len:
            raise ValueError(
                f"model.max_model_len={length}: must not exceed the model's own {loaded.config.longest_len}; "
                "lower it"
            )
        loaded = dataclasses.replace(loaded, config=loaded.config.for_length(length))
        self.model_config = loaded.config
        self.understood = loaded.understood
        self.chat_template = _read_template(config.model.chat_template)
        self.model_name = loaded.name
        self.max_model_len = length
        self._weights: tuple[int, str] | None = None  # version and digest, once it is asked for
        self._sample = loaded.sample
        groups, layouts = plan_pools(loaded.config, config, length)
        self._kv_groups = groups
        place = make_place(loaded.config, config.runtime.tensor_parallel)
        pool_bytes = sum(place.layout(layout).num_bytes for layout in layouts) * place.devices
        check_memory(pool_bytes * place.num_here // place.devices, layouts[0].num_blocks, place.num_here)
        self.events = EventLog(config.cache.event_log) if config.cache.event_log else None
        self.manager = make_manager(
            config.cache,
            num_blocks=layouts[0].num_blocks,
            max_model_len=length,
            groups=groups,
            events=self.events,
        )
        with bar("compiling the kernels for this CPU", None, self.progress and native.needs_build()):
            try:
                native.prepare(config.runtime.implementation or None)
            except RuntimeError as error:  # only where it was asked for by name
                raise NotImplementedError(f"runtime.implementation=native: {error}; try xla") from None
            try:
                products.prepare(config.runtime.products)
            except RuntimeError as error:
                raise NotImplementedError(f"runtime.products=native: {error}; try xla") from None
        self.runner = JaxRunner(
            loaded.config,
            loaded.params,
            layouts,
            config.scheduler,
            max_model_len=length,
            host_blocks=config.cache.host_blocks,
            implementation=config.runtime.implementation or None,
            on_compile=on_compile,
            writable=self.manager.writable if config.runtime.checked else None,
            prefix_groups=config.runtime.prefix_groups,
            deterministic=config.runtime.deterministic,
            tuning=self._tuning,
            place=place,
            products=config.runtime.products,
            num_steps=config.runtime.num_steps,
        )
        if self._channel is not None and self._channel.hosts.index == 0:
            self.runner.lead(self._channel)
            self._channel.tell(("model", config.model.model, loaded.sample))
            atexit.register(self.close)
        self.runner.may_plan = self._channel is None or self._channel.hosts.index == 0
        self.engine = Engine(
            self.manager,
            self.runner,
            config.scheduler,
            max_model_len=length,
            eos_token_ids=loaded.config.eos_token_ids,
            decode=loaded.tokenizer.decode,
            hash_scheme=config.cache.hash,
            seed=config.runtime.seed,
            on_step=on_step,
            overlap=self.overlap.on,
            num_steps=config.runtime.num_steps,
        )

    def follow(self) -> None:
        """Do what process 0 does until it ends; for the other processes of a run on several hosts."""
        from pagedjax.runtime.following import follow
        from pagedjax.runtime.settings import own_settings

        if self._channel is None or self._channel.hosts.index == 0:
            raise ValueError("follow: is for processes after the first; give hosts with their index")
        with own_settings():
            follow(self.runner, self._channel, self._sample, self._load)

    def close(self) -> None:
        """End the other processes of a run on several hosts; at the program's end it happens by itself."""
        if self._channel is not None:
            self._channel.close()

    def _load(self, source: str) -> LoadedModel:
        """A model's weights where they belong: on several devices, each reads its own part."""
        from pagedjax.models import load_model
        from pagedjax.runtime.mesh import make_dealer

        return load_model(
            source,
            dtype=self.config.model.dtype,
            cache_dir=self.cache_dir,
            progress=self.progress,
            dealer=make_dealer(self.config.runtime.tensor_parallel),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        extra: ExtraKeys = ExtraKeys(),
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, batched continuously; one output per prompt, in order.

        Threads may call this side by side: their prompts run in the same steps, and the threads take turns.

        Args:
            prompts: Texts, or token id lists; a single one is a batch of one.
            sampling: For all, or one per prompt; None is `default_sampling()`.
            request_ids: One per prompt, to `abort` it by; None assigns numbers.
            extra: Extra keys of all of them (adapter, cache salt).
            priority: Of all of them; higher is admitted first and preempted last.
            progress: Show a bar on stderr; None follows the object's setting.

        Raises:
            ValueError: One of the prompts can never run; none was started.
        """
        batch = [prompts] if isinstance(prompts, str) or _is_token_ids(prompts) else list(prompts)
        sampling = self.default_sampling() if sampling is None else sampling
        params = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(batch)
        if len(params) != len(batch):
            raise ValueError(
                f"sampling: {len(params)} given for {len(batch)} prompts; give one for all or one for each"
            )
        token_ids = [self.encode(prompt) for prompt in batch]  # type: ignore[arg-type]
        for ids, one in zip(token_ids, params, strict=True):
            self.engine.check(ids, one)
        with bar("generating", len(batch), self.progress if progress is None else progress) as advance:
            return self.engine.complete(
                list(zip(token_ids, params, strict=True)),
                request_ids=request_ids,
                extra=extra,
                priority=priority,
                on_end=lambda output: advance(1),
            )

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations under the model's chat template.

        Args:
            conversations: One list of {"role", "content"} messages, or a list of such lists. A content is text,
                or a list of {"type": "text", "text"} parts.
            sampling: As in `generate`.
            template: Jinja source in place of `model.chat_template` and of the model's own.
            template_args: What else the template asks for, as `enable_thinking`.
            **options: As in `generate`.

        Raises:
            ValueError: There is no template, it refuses the messages, or it does not use an argument.
        """
        many = (
            conversations if conversations and not isinstance(conversations[0], Mapping) else [conversations]
        )
        prompts = [self.encode_chat(m, template=template, template_args=template_args) for m in many]  # type: ignore[arg-type]
        return self.generate(prompts, sampling, **options)

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        extra: ExtraKeys = ExtraKeys(),
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """Yield one prompt's output as it grows; leaving the loop early aborts the request."""
        sampling = self.default_sampling() if sampling is None else sampling
        ids = self.encode(prompt)
        self.engine.check(ids, sampling)  # now, not when the first output is asked for
        return self.engine.stream(ids, sampling, request_id=request_id, extra=extra, priority=priority)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, from any thread or hook; whoever waits for it gets what there is, as aborted.

        Returns:
            Its last output; None where no such request is live.
        """
        return self.engine.abort(request_id)

    def new_manager(self) -> PagedManager | ReservationManager:
        """An empty manager like the engine's own: the same pools, settings and limits, and nobody's blocks.

        For a second engine on the same runner, after the first is done, or for planning a run once more
        (`pagedjax.sim.play.follow`).
        """
        return make_manager(
            self.config.cache,
            num_blocks=self.manager.pool_blocks[0],
            max_model_len=self.max_model_len,
            groups=self._kv_groups,
        )

    def record(
        self, path: str | Path, *, text: bool = False, about: Mapping[str, Any] | None = None
    ) -> Recorder:
        """Write down what happens from now on; a context manager, closed at the end of its block.

        Args:
            path: File to write, JSON lines; gzip where it ends in .gz.
            text: Write the prompts' text, too. Off by default: a record may be shown around.
            about: More for its first frame, such as the trace's digest and the command.

        Raises:
            ValueError: Requests run, or a record is being written already.

        Example:
            >>> with llm.record("run.jsonl"):  # doctest: +SKIP
            ...     llm.generate("Once upon a time")
        """
        from pagedjax.report.record import Recorder

        first = {
            "kind": "measured",
            "model": self.model_name,
            "settings": self.config.to_dict(),
            "groups": [group.window for group in self._kv_groups],
            **(about or {}),
        }
        return Recorder(path, self.engine, first, decode=self.tokenizer.decode if text else None)

    def save_cache(
        self, path: str | Path, prompts: Prompt | Sequence[Prompt], *, extra: ExtraKeys = ExtraKeys()
    ) -> int:
        """Write the KV blocks of prompts to disk, for `load_cache` in another process.

        What of them is not in the cache is computed first. A crash in the middle leaves what was there.

        Args:
            path: Folder; an older snapshot in it is replaced.
            prompts: Whose full blocks to keep; blocks they share are written once.
            extra: Extra keys under which they will be asked for.

        Returns:
            Tokens written.

        Raises:
            ValueError: Reservations share nothing, or the blocks cannot be held at once.
        """
        from pagedjax.runtime.settings import own_settings
        from pagedjax.runtime.snapshot import save_snapshot

        manager = self._paged_manager("save_cache")
        batch = [prompts] if isinstance(prompts, str) or _is_token_ids(prompts) else list(prompts)
        token_ids = [self.encode(prompt) for prompt in batch]  # type: ignore[arg-type]
        self.generate(token_ids, SamplingParams(max_tokens=1), extra=extra, progress=False)
        chains = [self._chain(ids, extra) for ids in token_ids]
        with self.engine.paused(), own_settings():
            return save_snapshot(Path(path), self._cache_owner(), chains, manager, self.runner)

    def load_cache(self, path: str | Path) -> int:
        """Take a snapshot's blocks into the cache; prompts that begin with its prefixes hit from the first.

        Args:
            path: Folder that `save_cache` wrote.

        Returns:
            Tokens that can be hit now; fewer than were written where the pool is too small.

        Raises:
            ValueError: No whole snapshot, or one of another model, weights, dtype, layout or hash (named).
        """
        from pagedjax.runtime.settings import own_settings
        from pagedjax.runtime.snapshot import load_snapshot

        manager = self._paged_manager("load_cache")
        with self.engine.paused(), own_settings():
            return load_snapshot(Path(path), self._cache_owner(), manager, self.runner)

    # ------------------------------------------------------------------ cache

    def pin(self, prompt: Prompt, *, extra: ExtraKeys = ExtraKeys()) -> int:
        """Keep a prompt's blocks from eviction until `unpin`; what of them is not cached is computed first.

        Args:
            prompt: Its full blocks are kept.
            extra: Extra keys under which it will be asked for.

        Returns:
            Tokens pinned; 0: pinned already, shorter than a block, or nothing is shared here.
        """
        ids = self.encode(prompt)
        self.generate([ids], SamplingParams(max_tokens=1), extra=extra, progress=False)
        with self.engine.paused():
            return self.manager.pin(self._chain(ids, extra))

    def unpin(self, prompt: Prompt, *, extra: ExtraKeys = ExtraKeys()) -> bool:
        """Undo `pin`; False: it was not pinned."""
        chain = self._chain(self.encode(prompt), extra)
        with self.engine.paused():
            return self.manager.unpin(chain)

    def reset_prefix_cache(self, *, preempt: bool = False) -> ResetReport:
        """Forget everything that is cached, on the device and on the host.

        Args:
            preempt: Requests that run begin again, keeping their tokens, and pins are undone. Off: while a request
                runs or something is pinned nothing is forgotten.

        Returns:
            Truthy where the cache is empty now; else it says how many sequences and pins were in the way.
        """
        with self.engine.paused():
            return self.engine.start_over() if preempt else self.manager.reset()

    def stats(self) -> dict[str, Any]:
        """What cache and engine have done since they were made, in plain values.

        `cache`: the fields of `CacheStats`, and its hit rate (None before the first request); `blocks`: usable and
        free ones; `engine`: steps, how many of them were planned ahead and why others were not (`StepRecord.overlap`),
        how many ran several a dispatch and why others ran alone (`StepRecord.dispatch`), requests waiting and running,
        preemptions, swaps, compiled programs, the weights' version.
        """
        with self.engine.paused():
            scheduler, counts = self.engine.scheduler, self.manager.stats.snapshot()
            return {
                "cache": {
                    **dataclasses.asdict(counts),
                    "hit_rate": counts.hit_rate if counts.prompt_tokens else None,
                },
                "blocks": {"usable": self.manager.num_usable, "free": self.manager.num_free},
                "engine": {
                    "steps": scheduler.step,
                    "overlap": dict(self.engine.overlaps),
                    "dispatch": dict(self.engine.dispatches),
                    "waiting": len(scheduler.waiting),
                    "running": len(scheduler.running),
                    "preemptions": scheduler.num_preemptions,
                    "swaps": scheduler.num_swaps,
                    "programs": self.runner.num_programs,
                    "weights_version": self.runner.weights_version,
                },
                **({} if self._channel is None else {"hosts": self._channel.counts()}),
            }

    def update_weights(self, weights: Mapping[str, Any] | str | Path) -> None:
        """Go on with other weights of the same shapes: the one way to change them.

        Everything cached, pinned or swapped belongs to the old weights and is forgotten; requests that run begin
        again, keep the tokens they have, and go on with the new ones. Snapshots saved from here on carry the new
        weights' digest.

        Args:
            weights: A dict of whole arrays as `runner.params` is, or a model as the `model.model` setting names it.
                Several hosts each read the model; a dict is dealt out to them.

        Raises:
            ValueError: Another model; names what differs. Nothing was changed.
        """
        from pagedjax.runtime.settings import own_settings

        self.runner.check_may_plan()
        with own_settings():
            name, params, source = self.model_name, weights, None
            if isinstance(weights, str | Path):
                loaded = self._load(str(weights))
                source = str(weights), loaded.sample
                if loaded.config.for_length(self.max_model_len) != self.model_config:
                    raise ValueError(
                        f"{weights}: is of other shapes or settings than {self.model_name}; build another LLM for it"
                    )
                name, params = loaded.name, loaded.params
            with self.engine.paused():
                self.runner.update_weights(params, source=source)  # type: ignore[arg-type]
                self.model_name = name
                self.engine.start_over()

    def _chain(self, ids: Sequence[int], extra: ExtraKeys) -> TokenChain:
        return TokenChain(ids, block_size=self.manager.block_size, hash=self.config.cache.hash, extra=extra)

    def _paged_manager(self, what: str) -> PagedManager:
        self.runner.check_may_plan()
        if not isinstance(self.manager, PagedManager):
            raise ValueError(f"{what}: reservations share nothing; leave cache.reservation empty")
        return self.manager

    def _cache_owner(self) -> Owner:
        from pagedjax.runtime.snapshot import Owner, kv_config, weights_digest

        version = self.runner.weights_version
        if self._weights is None or self._weights[0] != version:
            self._weights = version, weights_digest(self.runner.leaves())
        layouts = self.runner.layouts
        groups = [group.window or 0 for group in self._kv_groups]
        return Owner(
            self.model_name,
            self._weights[1],
            layouts[0].dtype,
            layouts[0].block_size,
            tuple(
                (w, l.num_layers, l.num_kv_heads, l.head_dim) for w, l in zip(groups, layouts, strict=True)
            ),
            self.config.cache.hash,
            kv_config(self.model_config),
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, with the model's own special tokens; ids pass through, checked.

        Raises:
            ValueError: An id is not in the vocabulary.
        """
        if isinstance(prompt, str):
            prompt.encode()  # a lone surrogate is no text, and tokenizers say so unclearly
            prompt = self.tokenizer.encode(prompt)
        check_token_ids(prompt, self.model_config.vocab_size)
        return [int(token) for token in prompt]

    def default_sampling(self, **given: Any) -> SamplingParams:
        """What a request is sampled with that gives no `SamplingParams`: the model's own settings.

        Args:
            **given: Fields of `SamplingParams` that count before the model's.
        """
        own = dict(self.understood.sampling)
        if given.get("beam_width"):  # beams are not drawn
            drawn = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            own = {name: value for name, value in own.items() if name not in drawn}
        return SamplingParams(**{**own, **given})

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to speak; arguments as in `chat`."""
        text = self.tokenizer.apply_chat(
            messages,
            add_generation_prompt=True,
            template=self.chat_template if template is None else template,
            variables=template_args,
        )
        ids = self.tokenizer.encode(text, add_special=False)
        check_token_ids(ids, self.model_config.vocab_size)
        return ids

    def warm_up(self, *, mixed: bool = True) -> None:
        """Compile programs now (at most 12; cached on disk), with a progress bar.

        Args:
            mixed: Also those of steps that decode and prefill at once. Without arrivals while others
                decode, as in a script that runs one batch after another, they are never needed.
        """
        buckets = [b for b in self.runner.programs if mixed or not (b.num_decodes and b.num_prefill_tokens)]
        with self.engine.paused(), bar("compiling", len(buckets), self.progress) as advance:
            self.runner.warm_up(lambda _: advance(1), buckets)


def _check_names(config: Config) -> None:
    """Refuse a name that does not exist before a model is fetched and loaded."""
    from pagedjax.kernels import KERNEL_PLUGINS

    make_manager(dataclasses.replace(config.cache, host_blocks=0), num_blocks=2, max_model_len=1)
    name = config.runtime.implementation
    if name:
        try:
            KERNEL_PLUGINS.find(name)
        except ValueError as error:
            raise ValueError(f"runtime.{error}, or empty for the best that serves here") from None


def _check_int8(config: Config) -> None:
    """Refuse int8 weights where nobody multiplies with them, before they are read."""
    from pagedjax.kernels.layout import device_class

    if config.model.dtype != "int8":
        return
    if device_class() != "cpu":
        raise ValueError(
            f"model.dtype=int8: is for CPUs, and this is a {device_class().upper()}; try bfloat16"
        )
    if config.runtime.tensor_parallel > 1:
        raise ValueError(
            f"model.dtype=int8: runs on one device, not tensor_parallel={config.runtime.tensor_parallel}; "
            "try float32 or bfloat16"
        )


def _read_template(path: str) -> str | None:
    """The chat template of `model.chat_template`; None where the model's own is used."""
    if not path:
        return None
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ValueError(
            f"model.chat_template={path}: {reason}: must be a file with a Jinja template"
        ) from None


def _is_token_ids(prompts: Any) -> bool:
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__") or isinstance(prompts, Mapping):
        raise ValueError(f"prompts={prompts!r}: must be texts or lists of token ids")
    return bool(len(prompts)) and not isinstance(prompts[0], str) and not hasattr(prompts[0], "__len__")


def _keep_compiled_programs(setting: str, cache_dir: Path) -> None:
    """Point jax's persistent compilation cache at a folder: an unrolled step takes seconds to compile."""
    import jax

    if setting == "off":
        return
    folder = Path(setting) if setting else cache_dir / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # XLA's own caches would put the folder's path into every key: a folder that is moved would miss.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
