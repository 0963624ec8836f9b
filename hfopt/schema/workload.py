"""What is trained and on what: the model with its batches ready to be built anywhere, the cards and the host around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hfopt.schema.job import Assumption, Precision, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card: from NVML and the catalog, or from the catalog alone (then uuid, free and driver facts are None)."""

    name: str
    vendor: Literal["nvidia", "amd", "apple"] = "nvidia"
    memory_bytes: int  # what the driver reports as total
    usable_bytes: int | None = None  # what CUDA shows a program as total (cudaMemGetInfo): without the driver's own part
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    sms: int | None = None
    bandwidth_bytes_per_s: float | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # dense, by 'fp32', 'tf32', 'fp16', 'bf16', 'fp8'
    power_limit_w: float | None = None
    pcie_bytes_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None  # total, one direction
    nvlink_by_bridge: bool = False  # it joins two cards, where the part was bought
    uuid: str | None = None
    index: int | None = None  # the driver's, as nvidia-smi shows it; CUDA's is the place in Hardware.gpus
    mig: bool = False
    catalog_name: str | None = None  # None: not in the catalog, planned by memory only
    source: str | None = None

    @property
    def available_bytes(self) -> int:
        """What a new process can take: what is free now, else what CUDA shows as total, else all of it."""
        return next(size for size in (self.free_bytes, self.usable_bytes, self.memory_bytes) if size is not None)

    def supports(self, precision: Precision) -> bool:
        """bf16 and tf32 need 8.0; fp16 tensor cores came with 7.0, before that fp16 saves memory only."""
        if precision in ("bf16", "tf32"):
            return self.capability is not None and self.capability >= (8, 0)
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine around the card, as far as this process may use it (affinity, cgroup)."""

    cores: float
    ram_bytes: int
    ram_free_bytes: int
    cpu_name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    gpus: tuple[Gpu, ...]  # () : the CPU is the device
    host: Host
    driver_version: str | None = None
    cuda_version: str | None = None
    notes: tuple[str, ...] = ()  # what was found odd, for the report
    hypothetical: bool = False  # the card was named, not detected

    @property
    def smallest(self) -> Gpu | None:
        """The card that rules: with several different ones, the one with the least memory."""
        return min(self.gpus, key=lambda gpu: gpu.memory_bytes, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """What one batch looks like; the batch size itself is given when it is made."""

    kind: Literal["text", "text_to_text", "image", "detection", "video", "series", "audio", "audio_to_text", "image_text", "custom"]
    length: int | None = None  # tokens
    target_length: int | None = None
    height: int | None = None
    width: int | None = None
    channels: int | None = None
    frames: int | None = None  # of a video
    audio_samples: int | None = None
    padded: bool = True  # the attention mask has zeros in it


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSpread:
    """How long the samples are, where each batch is padded to its own longest."""

    longest: int
    lengths: tuple[int, ...]  # each stands for the same share of the samples, ascending
    grouped: bool = False  # a batch is made of samples of like length


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFacts:
    """What planning reads of a model's configuration, and of one sample of its batches; unknown is None."""

    model_type: str | None = None
    hidden_size: int | None = None  # the widest, where it has several
    layers: int | None = None  # of the text model, as are the following
    heads: int | None = None
    key_value_heads: int | None = None
    head_size: int | None = None
    width: int | None = None
    vocabulary: int | None = None
    tied_head: bool = False
    sample_bytes: int | None = None  # of one sample's tensors
    spectrogram: bool = False  # sound comes as a picture of its frequencies

    @classmethod
    def of(cls, config: Any) -> ConfigFacts:
        """Off a model's configuration, whatever it is; of a sample it says nothing."""
        text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
        inner: Any = getattr(config, "text_config", None) or config
        hidden = getattr(inner, "hidden_size", None) or max(getattr(inner, "hidden_sizes", None) or [0])
        model_type = getattr(config, "model_type", None)
        return cls(
            model_type=model_type if isinstance(model_type, str) else None,
            hidden_size=int(hidden) or None,
            layers=_whole_number(text, "num_hidden_layers"),
            heads=_whole_number(text, "num_attention_heads"),
            key_value_heads=_whole_number(text, "num_key_value_heads"),
            head_size=_whole_number(text, "head_dim"),
            width=_whole_number(text, "hidden_size"),
            vocabulary=_whole_number(text, "vocab_size"),
            tied_head=bool(getattr(text, "tie_word_embeddings", False)),
        )


def _whole_number(config: Any, name: str) -> int | None:
    """What the configuration says; of layers that differ (transformers refuses the question) the largest."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return max((_whole_number(layer, name) or 0 for layer in config.per_layer_config), default=0) or None
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes:
    """A transformer of equal blocks by the sizes of its matrices, which are nearly all of its parameters."""

    layers: int
    width: int
    inner: int  # of the feed-forward part
    gated: bool  # it has three matrices, not two
    heads: int
    query_width: int
    key_value_width: int
    vocabulary: int
    tied: bool  # the head is the embedding
    parameters: int  # as published

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each matrix of a block."""
        around = ((self.width, self.query_width), *2 * ((self.width, self.key_value_width),), (self.query_width, self.width))
        return (*around, *(2 if self.gated else 1) * ((self.width, self.inner),), (self.inner, self.width))

    @property
    def block_elements(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def matrix_elements(self) -> int:
        return self.layers * self.block_elements + (1 if self.tied else 2) * self.vocabulary * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The model and its batches, ready to be built anywhere.

    `build_model()` returns a fresh nn.Module in training mode with adapters, frozen parts and dtypes in place, in the form the calling
    context asks for: inside a FakeTensorMode fake CPU tensors (no weight is ever allocated; other dispatch modes are set aside then and
    see nothing), inside `torch.device("meta")` meta tensors, else real ones with the model's own initialisation. `make_batch(n)` returns a
    dict of CPU tensors for n samples; values of masks and labels matter, so a tracer makes it outside its fake mode, or keeps them.
    `compute_loss(model, batch)` is the Trainer's, or None for `model(**batch).loss`.
    """

    name: str
    model_class: str
    task: Task
    build_model: Callable[[], Any]
    make_batch: Callable[[int], dict[str, Any]]
    shape: BatchShape
    compute_loss: Callable[[Any, dict[str, Any]], Any] | None = None
    parameters: int
    trainable_parameters: int
    layers: int | None = None  # repeated blocks, what every_n_layers counts
    tokens_per_sample: int | None = None
    checkpointable: bool = True
    batch_dependent_loss: str | None = None  # why the loss is not a mean over samples, when it is not
    config: Any = None  # the model's own configuration; None: it has none
    weights_dtype: str | None = None  # what the weights are stored in while training; None: not known
    checkpoint_dtype: str | None = None  # what its configuration says the checkpoint is stored in
    lengths: LengthSpread | None = None  # None: every batch is as long as `shape` says, or nothing else is known
    with_layers: Callable[[int], Workload | None] | None = None  # the same with another number of blocks; None: cannot be built so
    assumed: tuple[Assumption, ...] = ()  # what its picture rests on, guesses marked
    notes: tuple[str, ...] = ()
    facts: ConfigFacts = field(default_factory=ConfigFacts)  # of its configuration; empty where it has none
    key: str | None = None  # the same for the same model, data and trainer; None: nothing of it may be kept on disk
    blocks: BlockSizes | None = None  # where its facts were counted instead of read off a model (`memory.counted_step`)
    remake: Callable[[], Workload] | None = field(default=None, compare=False)  # the whole of one whose facts come from the disk
