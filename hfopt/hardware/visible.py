"""Which of the machine's cards CUDA shows this process: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, read as the driver reads them.

Unset shows all, empty shows none. Entries are indices, or prefixes of a UUID (GPU-..., MIG-...), all of the kind of the first. The first
entry that names no card hides itself and all after it ('0,-1,1' shows one card); a card given twice, or a prefix that fits two, shows none.
Indices count in CUDA's order: the fastest card first and the others by PCI bus, unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
Of MIG instances CUDA shows one process one; indices do not reach them while there are whole cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A card or MIG instance as the driver lists it."""

    uuid: str
    speed: float = 0.0  # any measure by which cards compare
    mig: bool = False
    legacy_uuid: str | None = None  # MIG-GPU-<card>/<gpu instance>/<compute instance>, before driver 470
    split: bool = False  # a card in MIG mode: CUDA shows its instances, not the card


def visible(listed: Sequence[Listed], environment: Mapping[str, str]) -> tuple[Listed, ...]:
    """The devices CUDA shows, in CUDA's order."""
    ordered = _cuda_order(listed, environment)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    whole = [device for device in ordered if not device.mig and not device.split]
    instances = [device for device in ordered if device.mig]
    if wanted is None:
        return tuple(whole or instances[:1])
    chosen: list[Listed] = []
    entries = [entry.strip() for entry in wanted.split(",")]
    for entry in entries:
        fitting = _fitting(entry, whole or instances[:1], ordered)
        if not fitting or _kind(entry) != _kind(entries[0]):
            break
        if len(fitting) > 1 or fitting[0] in chosen:
            return ()
        chosen.append(fitting[0])
    if any(device.mig for device in chosen):
        return tuple(device for device in chosen if device.mig)[:1]
    return tuple(chosen)


def _kind(entry: str) -> str:
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else "index"


def _fitting(entry: str, by_index: Sequence[Listed], ordered: Sequence[Listed]) -> list[Listed]:
    if _kind(entry) != "index":
        named = [device for device in ordered if device.uuid.startswith(entry) or (device.legacy_uuid or "").startswith(entry)]
        if entry.startswith("GPU-"):  # a card in MIG mode stands for its first instance
            named = [by_index[0] if device.split and by_index and by_index[0].mig else device for device in named]
        return named
    index = _leading_integer(entry)
    return [by_index[index]] if index is not None and 0 <= index < len(by_index) else []


def _leading_integer(entry: str) -> int | None:
    """As strtol reads it: '1' and '+1' are 1, '1x' is 1, 'x' is nothing."""
    sign, digits = (entry[:1], entry[1:]) if entry[:1] in ("+", "-") else ("", entry)
    length = next((place for place, letter in enumerate(digits) if letter not in "0123456789"), len(digits))
    return int(sign + digits[:length]) if length else None


def _cuda_order(listed: Sequence[Listed], environment: Mapping[str, str]) -> list[Listed]:
    cards = [device for device in listed if not device.mig]
    if environment.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST").upper() == "PCI_BUS_ID" or not cards:
        return list(listed)
    fastest = max(cards, key=lambda device: device.speed)  # the first of equals
    return [fastest, *(device for device in listed if device is not fastest)]
