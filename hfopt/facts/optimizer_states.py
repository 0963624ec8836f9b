"""What the Trainer's optimizers keep for each trained weight, by the value of `optim`.

Sources: torch/optim/adamw.py (two moments in the weight's dtype; the foreach implementation takes the square root of the second one beside
it), bitsandbytes/optim/optimizer.py (8-bit states hold one byte per element and a float32 scale per block of 256; tensors below 4096
elements and, in the Trainer, embeddings keep 32 bits; paged states of at least 100,000 elements live in managed memory, which the driver
keeps on the host until a kernel needs it).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SMALLEST_8BIT, SMALLEST_PAGED, BLOCK_8BIT = 4096, 100_000, 256  # elements
TORCH_ADAM = ("adamw_torch", "adamw_torch_fused")
FOREACH_ADAM = "adamw_torch"
FUSED_ADAM = "adamw_torch_fused"
_BITSANDBYTES = re.compile(r"^(paged_)?(adamw|lion|rmsprop|ademamix)(_bnb)?(_8bit|_32bit)?$")
_STATES = {"adamw": 2, "lion": 1, "rmsprop": 1, "ademamix": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class BitsAndBytesStates:
    """What the name of one of bitsandbytes' optimizers says."""

    count: int
    eight_bit: bool
    paged: bool

    def element_bytes(self, elements: int, *, embedding: bool) -> int:
        """Of all states of one tensor, on the card."""
        eight = self.eight_bit and elements >= SMALLEST_8BIT and not embedding
        held = 0 if self.paged and elements >= SMALLEST_PAGED else elements * (1 if eight else 4)
        return self.count * (held + (4 * -(-elements // BLOCK_8BIT) if eight else 0))


def bitsandbytes_states(optim: str) -> BitsAndBytesStates | None:
    """None: not one of bitsandbytes'."""
    match = _BITSANDBYTES.match(optim)
    if match is None or not (match[1] or match[2] in ("lion", "ademamix") or match[3] or match[4]):
        return None
    return BitsAndBytesStates(count=_STATES[match[2]], eight_bit=match[4] == "_8bit", paged=match[1] is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """The optimizer that is planned in place of one that is not modelled."""

    optim: str
    why: str


_WHOLE = "AdamW's whole states are planned, which take more than projected ones"
_STAND_INS: tuple[tuple[str, StandIn], ...] = (
    (r"(galore|apollo)_adamw(_layerwise)?", StandIn(optim=FUSED_ADAM, why=_WHOLE)),
    (r"galore_adamw_8bit(_layerwise)?", StandIn(optim="adamw_bnb_8bit", why="whole 8-bit states are planned, which take more")),
    (r"galore_adafactor(_layerwise)?", StandIn(optim="adafactor", why="Adafactor's whole states are planned, which take more")),
    (r"lomo", StandIn(optim="sgd", why="SGD is planned, whose gradients are whole and take more")),
    (r"adalomo", StandIn(optim="adafactor", why="Adafactor is planned, whose gradients are whole and take more")),
    (r"grokadamw", StandIn(optim="ademamix", why="three states of float32 are planned, as many as it keeps")),
    (r"schedule_free_(radam|adamw|sgd)|stable_adamw|adamw_anyprecision", StandIn(optim=FUSED_ADAM, why="AdamW's two states are planned")),
    (r"adamw_torch_(8|4)bit", StandIn(optim="adamw_bnb_8bit", why="bitsandbytes' 8-bit states are planned")),
    (r"adamw_torch_(xla|npu_fused)", StandIn(optim=FUSED_ADAM, why="it is for other devices: AdamW for CUDA is planned")),
)
"""Values of `optim` whose packages' updates are not traced. Sources: the papers and packages that transformers' OptimizerNames refers to:
galore-torch, apollo-torch, lomo-optim, grokadamw (a moving average of gradients beside Adam's two), schedulefree, torch-optimi, torchao."""


def stand_in(optim: str) -> StandIn | None:
    """None: it is traced itself, or nothing is known of it."""
    return next((found for pattern, found in _STAND_INS if re.fullmatch(pattern, optim)), None)
