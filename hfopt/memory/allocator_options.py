"""PYTORCH_CUDA_ALLOC_CONF, read: what of it changes how memory is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfopt.compat import installed_torch
from hfopt.errors import ConfigError
from hfopt.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorOptions:
    """The allocator's settings, and whose allocator it is; the defaults are those of the installed PyTorch."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_power2_divisions: int | None = None  # a power of 2; None: sizes are not rounded between powers of 2
    torch_version: tuple[int, int] = field(default_factory=installed_torch)


def parse_alloc_conf(text: str | None) -> AllocatorOptions:
    """'max_split_size_mb:128,expandable_segments:True' -> options. Keys that do not change sizes are passed over.

    So is garbage_collection_threshold: PyTorch acts on it only in a process that called torch.cuda.set_per_process_memory_fraction.
    """
    found: dict[str, str] = {}
    for item in (text or "").replace(" ", "").split(","):
        key, colon, value = item.partition(":")
        if item and not colon:
            raise ConfigError(f"PYTORCH_CUDA_ALLOC_CONF: {item!r} is not of the form key:value")
        found[key] = value
    try:
        split = found.get("max_split_size_mb")
        divisions = found.get("roundup_power2_divisions")
        return AllocatorOptions(
            expandable_segments=found.get("expandable_segments", "").lower() == "true",
            max_split_bytes=int(split) * MIB if split else None,
            roundup_power2_divisions=int(divisions) if divisions and divisions.isdigit() and divisions != "1" else None,
        )
    except ValueError as error:
        raise ConfigError(f"PYTORCH_CUDA_ALLOC_CONF: {error}", hint="for example max_split_size_mb:128") from error
