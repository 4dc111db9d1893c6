"""Settings as frozen dataclasses: what each knob means, its unit, and when to change it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelSource:
    """Which model, and in which precision.

    Attributes:
        model: A named model ("smollm2-135m"), a GGUF file, a safetensors or orbax folder, or an HF hub id.
        dtype: Weights on the device. float32 on CPU (bf16 matrix-vector products are slow there),
            bfloat16 on TPU and GPU.
        max_model_len: Longest prompt + output in tokens; 0 takes the model's own, at most 2,048.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"
    max_model_len: int = 0


@dataclass(frozen=True)
class CacheConfig:
    """The KV pool and how prefixes are shared.

    Attributes:
        block_size: Tokens per KV block, a power of two between 1 and 1024. 16 suits short traffic;
            64 and more suit TPUs and long prompts.
        num_blocks: Blocks in the pool, the null block included; 0 sizes it from memory_bytes.
        memory_bytes: Bytes for the pool where num_blocks is 0.
        index: Prefix index: "hash" (chained block hashes), "table" (sharing by fork only).
        policy: Eviction policy by name.
        hash: Block hash: "sha256".
        prefix_caching: Look prompts up and index full blocks. Off: nothing is shared but forks.
        dtype: KV in the pool; "" follows the model's dtype.
    """

    block_size: int = 16
    num_blocks: int = 0
    memory_bytes: int = 1 << 30
    index: str = "hash"
    policy: str = "lru"
    hash: str = "sha256"
    prefix_caching: bool = True
    dtype: str = ""


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one step may hold.

    Attributes:
        max_num_seqs: Sequences that run at once.
        token_budget: Tokens per step, decodes and prefill chunks together.
        chunk_tokens: Longest prefill chunk of one sequence in one step; 0 is the token budget.
        chunked_prefill: Off: a prompt is computed in one step or refused at submission.
    """

    max_num_seqs: int = 32
    token_budget: int = 288
    chunk_tokens: int = 256
    chunked_prefill: bool = True


@dataclass(frozen=True)
class RuntimeConfig:
    """The device side.

    Attributes:
        implementation: Attention implementation; "" tries the preferred order.
        compilation_cache_dir: Folder where compiled programs are kept between runs; "" is the user's
            cache folder, "off" keeps none.
        seed: Root of the per-request seeds where a request gives none.
    """

    implementation: str = ""
    compilation_cache_dir: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Config:
    """Everything an engine is built from."""

    model: ModelSource = field(default_factory=ModelSource)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
