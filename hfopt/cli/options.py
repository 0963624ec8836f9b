"""Options that several commands share, and the checks of words that must be one of a few.

Words of the command line that must be one of a few: a wrong one is answered with those there are, and a shell completes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from hfopt.errors import ConfigError

if TYPE_CHECKING:
    from hfopt.schema import Precision, Task


LENGTHS_HELP = "Lengths of typical samples, each for the same share of the data: batches are padded to their own longest."
ONE_TOKEN = "a sequence has at least one token"


def task_of(text: str | None) -> Task | None:
    from hfopt.schema import Task

    return _chosen(text, get_args(Task), "--task")  # type: ignore[no-any-return]


def precision_of(text: str | None) -> Precision | None:
    from hfopt.schema import Precision

    return _chosen(text, get_args(Precision), "--precision")  # type: ignore[no-any-return]


def known_keys(keys: list[str]) -> frozenset[str]:
    """Of `--keep`: keys of the installed TrainingArguments."""
    from difflib import get_close_matches

    from hfopt.facts.training_keys import installed

    known = installed().fields
    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "name a key of TrainingArguments, such as per_device_train_batch_size"
            raise ConfigError(f"--keep {key}: not a key of TrainingArguments", hint=hint)
    return frozenset(keys)


def _chosen(text: str | None, able: tuple[str, ...], option: str) -> Any:
    if text is None:
        return None
    word = text.strip().lower().replace("-", "_")
    if word in able:
        return word
    raise ConfigError(f"{option} {text} is not known", hint=f"one of: {', '.join(able)}")


def complete_gpu(incomplete: str) -> list[str]:
    from hfopt.hardware.catalog import entries, shorthand

    return _beginning(incomplete.lower(), (shorthand(entry.name) for entry in entries()))


def complete_task(incomplete: str) -> list[str]:
    from hfopt.schema import Task

    return _beginning(incomplete, get_args(Task))


def complete_precision(incomplete: str) -> list[str]:
    from hfopt.schema import Precision

    return _beginning(incomplete, get_args(Precision))


def complete_model(incomplete: str) -> list[str]:
    """Of the bundled table."""
    from hfopt.model.known_models import architectures

    return [entry.hub_id for entry in architectures() if entry.hub_id.lower().startswith(incomplete.lower())]


def complete_key(incomplete: str) -> list[str]:
    """Of TrainingArguments."""
    from hfopt.facts.training_keys import installed

    return _beginning(incomplete, installed().fields)


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def numbers(option: str, text: str | None, *, least: str) -> tuple[int, ...]:
    """'1,2,4' -> (1, 2, 4); `least` says why none may be below one."""
    if text is None:
        return ()
    try:
        found = tuple(int(part) for part in text.replace(" ", "").split(",") if part)
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of whole numbers", hint=f"write for example {option} 16,32,64") from None
    if not found or min(found) < 1:
        raise ConfigError(f"{option} {text!r}: {least}", hint=f"write for example {option} 16,32,64")
    return found


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TrainingArguments YAML.")]
Vram = Annotated[float | None, typer.Option("--vram", metavar="GiB", min=0.1, help="Memory of the card, in GiB.")]
NumGpus = Annotated[int | None, typer.Option("--num-gpus", min=1, help="Devices of each machine.")]
EngineKey = Annotated[str | None, typer.Option("--engine", help="ddp, fsdp2, zero2, zero3 or one with -offload; else the cheapest.")]
Accelerate = Annotated[
    Path | None, typer.Option("--accelerate", metavar="FILE", help="A file of `accelerate config`: engine, processes and precision.")
]
Model = Annotated[str | None, typer.Option("--model", help="Hub id, folder or config.json, instead of the YAML's model.")]
Like = Annotated[
    str | None,
    typer.Option(
        "--like", metavar="ID", autocompletion=complete_model, help="A known model of the same architecture, for one that is not."
    ),
]
ModelFrom = Annotated[Path | None, typer.Option("--model-from", metavar="FILE", help="Another YAML, which names the model.")]
Samples = Annotated[int | None, typer.Option("--samples", min=1, help="Training samples, when the YAML does not say.")]
HostName = Annotated[
    str | None,
    typer.Option("--host", metavar="16cores,30us", help="The machine it will run on: cores, time of a launch, or its calibration's JSON."),
]
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
ForTransformers = Annotated[
    str | None,
    typer.Option("--for-transformers", metavar="VERSION", help="The version that will read the YAML, if not the installed one: 4.57."),
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")]


def allowed(items: list[str] | None) -> frozenset[str]:
    """`--allow optim,torch_compile --allow accumulation` -> all three."""
    return frozenset(part for item in items or () for part in item.split(","))
