"""The composed configuration, validated. Pure: no torch, no files, no environment.

Every model is strict (a number in quotes is not a number) and refuses unknown keys. The defaults live in `conf/`;
nothing here has one, so that a composed configuration is always whole.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from orchestrator.units import parse_size


class Node(BaseModel):
    """A node of the configuration: strict, closed and unchangeable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def _size(value: int | str) -> int:
    size = parse_size(value)
    if size <= 0:
        raise ValueError("must be more than nothing")
    return size


Size = Annotated[int | str, AfterValidator(_size)]
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
    kind: Literal["auto", "cuda", "cpu"]


class GpuConfig(Node):
    """The memory budget."""

    util: Annotated[float, Field(gt=0, le=1)]
    """Share of the device's total memory that this start may add to what its process holds."""
    index: NotNegative
    total_bytes: Size | None
    """What to take for the device's total memory; null for what the device says."""
    spec: str | None


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
    loader: str


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
    startup_plan: Literal["off"]
    cache: CacheConfig
    stages: dict[str, dict[str, Any]]
    run: RunConfig
    log: LogConfig
