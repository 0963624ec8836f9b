"""Options that several commands have: one name, one meaning, one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfopt.cli.choices import complete_key

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TrainingArguments YAML.")]
Vram = Annotated[float | None, typer.Option("--vram", metavar="GiB", min=0.1, help="Memory of the card, in GiB.")]
Model = Annotated[str | None, typer.Option("--model", help="Hub id, folder or config.json, instead of the YAML's model.")]
Section = Annotated[str | None, typer.Option("--section", help="Where the arguments are in the YAML, as a path of keys: trainer.args.")]
Keep = Annotated[
    list[str] | None,
    typer.Option("--keep", metavar="KEY", autocompletion=complete_key, help="Leave this key as it is; may be repeated."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", help="Also try: optim, torch_compile, use_liger_kernel, attn_implementation, accumulation."),
]
Headroom = Annotated[float, typer.Option("--headroom", help="Share of the memory to leave free.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")]


def allowed(items: list[str] | None) -> frozenset[str]:
    """`--allow optim,torch_compile --allow accumulation` -> all three."""
    return frozenset(part for item in items or () for part in item.split(","))
