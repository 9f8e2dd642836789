"""The composed configuration, validated. Pure: no torch, no files, no environment.

Every model is strict (a number in quotes is not a number) and refuses unknown keys. The defaults live in `conf/`;
nothing here has one, so that a composed configuration is always whole.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from orchestrator.errors import ConfigError
from orchestrator.units import NOT_A_SIZE, KiB, parse_size


class Node(BaseModel):
    """A node of the configuration: strict, closed and unchangeable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def _number_or_text(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(NOT_A_SIZE)
    return value


def _size(value: int | str) -> int:
    size = parse_size(value)
    if size <= 0:
        raise ValueError("must be more than nothing")
    return size


def _read_size(value: int | str) -> int:
    size = _size(value)
    if size < 64 * KiB:
        raise ValueError("must be at least 64 KiB")
    return size


Size = Annotated[int | str, BeforeValidator(_number_or_text), AfterValidator(_size)]
ReadSize = Annotated[int | str, BeforeValidator(_number_or_text), AfterValidator(_read_size)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class ModelConfig(Node):
    """Which model, and from where."""

    name: str
    path: str | None
    """A folder or a hub id; null for a model that the project makes itself."""
    revision: str | None
    dtype: Literal["auto", "float32", "float16", "bfloat16"]
    load_format: Literal["auto", "dummy"]
    trust_remote_code: bool
    profiler: str


class DeviceConfig(Node):
    kind: Literal["auto", "cuda", "cpu", "plan"]


class GpuSpec(Node):
    """A card's constants, for planning without it. They belong to card and allocator mode, never to a model."""

    name: str
    capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    """CUDA's, as "9.0"."""
    total_bytes: Positive
    """As the driver reports it."""
    driver_bytes: NotNegative
    """What nobody's process holds and is not free on an idle card."""
    context_bytes: NotNegative
    """What opening the device takes."""
    library_bytes: NotNegative
    """What kernels and libraries take outside torch's allocator once steps have run."""
    workspace_bytes: NotNegative
    """cuBLAS's workspace, taken from torch's allocator once a stream."""
    graph_bytes: NotNegative
    """What the first capture takes outside the allocator, whatever is captured."""
    graph_node_bytes: NotNegative
    """What a captured kernel takes outside the allocator."""
    attention: str
    """The attention backend to assume for `engine.attention=auto`."""
    allocator: Literal["expandable", "native"]
    """How torch's allocator makes segments: growing ones, which a start asks for, or of fixed sizes."""
    measured: bool
    """Whether the constants were read on such a card, or follow from those of another."""
    bound_fraction: Annotated[float, Field(ge=0, lt=1)]
    """How far the KV cache of a plan may be from a start's, as a share of the card's total."""


class GpuConfig(Node):
    """The memory budget."""

    util: Annotated[float, Field(gt=0, le=1)]
    """Share of the device's total memory that this start may add to what its process holds."""
    index: NotNegative
    total_bytes: Size | None
    """What to take for the device's total memory; null for what the device says."""
    spec: GpuSpec | None
    """The card to plan for (`device=plan`); nothing else reads it."""


class SchedulerConfig(Node):
    """The limits that size a profile run."""

    max_model_len: Positive | Literal["auto"]
    max_num_seqs: Positive
    max_num_batched_tokens: Positive


class LimitPerPrompt(Node):
    """Items of each modality that one prompt may carry; 0 turns a modality off."""

    image: NotNegative
    video: NotNegative
    audio: NotNegative


class ImageLimits(Node):
    max_size: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None
    """[width, height] in pixels."""


class VideoLimits(Node):
    max_frames: Positive | None
    max_size: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None


class AudioLimits(Node):
    max_seconds: Annotated[float, Field(gt=0)] | None


class MediaConfig(Node):
    """What a prompt may carry."""

    limit_per_prompt: LimitPerPrompt
    image: ImageLimits
    video: VideoLimits
    audio: AudioLimits
    processor_kwargs: dict[str, Any]


class EncoderConfig(Node):
    """Encoder tokens in one step, encoder tokens kept, items per encoder call."""

    compute_budget: Positive | Literal["auto"]
    cache_size: Positive | Literal["auto"]
    micro_batch: Positive | Literal["auto"]


class KVConfig(Node):
    """The KV cache. `bytes`: auto (what is left), need (what the limits take), or a size."""

    block_size: Positive
    dtype: Literal["auto", "float32", "float16", "bfloat16"]
    bytes: Literal["auto", "need"] | Size


class GraphsConfig(Node):
    mode: Literal["keep", "estimate", "none"]
    sizes: Literal["auto"] | Annotated[list[Positive], Field(min_length=1)]


class EngineConfig(Node):
    name: str
    attention: str
    tensor_parallel_size: Positive


class WeightsConfig(Node):
    """How a checkpoint reaches the device."""

    loader: str
    io: Literal["auto", "buffered", "direct"]
    """Through the page cache or past it."""
    threads: Positive | Literal["auto"]
    chunk_bytes: Literal["auto"] | ReadSize


class CacheConfig(Node):
    dir: str
    max_bytes: Size
    enabled: bool


class RunConfig(Node):
    dir: str | None
    """The folder of the record; null for a new one under `runs/`."""
    seed: NotNegative
    skip_existing: bool


class LogConfig(Node):
    json_lines: Annotated[bool, Field(alias="json")]


class Config(Node):
    """The whole configuration. `stages` is kept as it came: each stage's own `Config` validates its options."""

    model: ModelConfig
    device: DeviceConfig
    gpu: GpuConfig
    scheduler: SchedulerConfig
    mm: MediaConfig
    encoder: EncoderConfig
    kv: KVConfig
    graphs: GraphsConfig
    engine: EngineConfig
    weights: WeightsConfig
    startup_plan: Literal["off", "use", "refresh"]
    cache: CacheConfig
    stages: dict[str, dict[str, Any]]
    run: RunConfig
    log: LogConfig


def engine_name(config: Config) -> str:
    """The engine in the registry that runs the model: a plan's own in the place of `engine.name`.

    Raises:
        ConfigError: an engine that cannot be planned, or a plan's own elsewhere.
    """
    if config.device.kind != "plan":
        if config.engine.name == "plan":
            raise ConfigError.of("engine.name", "this is what device=plan runs on; transformers works here", "plan")
        return config.engine.name
    if config.engine.name != "transformers":
        raise ConfigError.of("engine.name", "device=plan knows the engine transformers alone", config.engine.name)
    return "plan"
