"""`hfopt plan`: the config with the fastest settings that fit, on stdout; the reasons on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfopt.cli.json_output import error_detail, json_text
from hfopt.cli.options import (
    LENGTHS_HELP,
    ONE_TOKEN,
    Accelerate,
    Allow,
    ConfigFile,
    EngineKey,
    ForTransformers,
    Headroom,
    HostName,
    Keep,
    Like,
    Model,
    ModelFrom,
    NumGpus,
    Samples,
    Section,
    TrustRemoteCode,
    Vram,
    allowed,
    complete_gpu,
    complete_task,
    known_keys,
    numbers,
    task_of,
)
from hfopt.cli.output import check_writable, people, print_error, progress_on, redirected, remark, write_out
from hfopt.errors import ConfigError, DryRunError

if TYPE_CHECKING:
    from hfopt.planner import Plan, Request

STDOUT = Path("-")
STYLES = {"title": "bold", "plain": "", "soft": "dim", "good": "green", "bad": "bold red", "stale": "yellow"}


GpuName = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", autocompletion=complete_gpu, help="Plan for this card (see `hfopt gpus`), here or not."),
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Machines.")]
Link = Annotated[str | None, typer.Option("--link", help="Between devices: nvlink, pcie or network[:400Gbit/s].")]
AssumeZero = Annotated[
    int | None,
    typer.Option("--assume-zero", min=1, max=3, metavar="STAGE", help="The ZeRO stage of a DeepSpeed config whose JSON is missing."),
]
ModelParallel = Annotated[int, typer.Option("--model-parallel", min=1, help="Devices that share their samples (TP, SP, CP).")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens per sample, when the YAML does not say.")]
Lengths = Annotated[str | None, typer.Option("--lengths", metavar="60,90,300,…", help=LENGTHS_HELP)]
TaskName = Annotated[
    str | None, typer.Option("--task", autocompletion=complete_task, help="For example causal_lm or sequence_classification.")
]
EffectiveBatch = Annotated[int | None, typer.Option("--effective-batch", metavar="N", min=1, help="Another batch.")]
LrScaling = Annotated[str, typer.Option("--lr-scaling", help="none, sqrt or linear, with --effective-batch.")]
DryRun = Annotated[
    bool | None,
    typer.Option("--dry-run/--no-dry-run", help="Try the result on the device, or rehearse it. Default: unless kept traces answer."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the plan as JSON there (- for stdout).")]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the plan as one page there (- for stdout).")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the YAML there, even CONFIG.")]
AsDiff = Annotated[bool, typer.Option("--diff", help="Print the reasons and a diff (as patch reads it) instead of the YAML.")]
LockFile = Annotated[
    Path | None, typer.Option("--lock", metavar="FILE", help="Keep the plan there; where it is kept, say what differs (exit 1).")
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Also runners-up, rejected settings, the parts of the memory and every note.")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No report.")]


def plan(
    config: ConfigFile,
    gpu: GpuName = None,
    vram: Vram = None,
    num_gpus: NumGpus = None,
    nodes: Nodes = 1,
    link: Link = None,
    host: HostName = None,
    engine: EngineKey = None,
    assume_zero: AssumeZero = None,
    model_parallel: ModelParallel = 1,
    accelerate: Accelerate = None,
    model: Model = None,
    like: Like = None,
    model_from: ModelFrom = None,
    seq_len: SeqLen = None,
    lengths: Lengths = None,
    samples: Samples = None,
    task: TaskName = None,
    section: Section = None,
    effective_batch: EffectiveBatch = None,
    lr_scaling: LrScaling = "none",
    keep: Keep = None,
    allow: Allow = None,
    headroom: Headroom = 0.06,
    dry_run: DryRun = None,
    trust_remote_code: TrustRemoteCode = False,
    for_transformers: ForTransformers = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    output: Output = None,
    as_diff: AsDiff = False,
    lock: LockFile = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Return the same config with the fastest settings that fit. The model and what it learns stay the same.

    \b
    Examples:
      hfopt plan train.yaml > planned.yaml               for the card here, or the CPU
      hfopt plan train.yaml --gpu 4090 -o train.yaml     for a card that is not here, in place
      hfopt plan train.yaml --diff -q                    what would change and why, nothing else
      hfopt plan train.yaml --html plan.html > new.yaml  also a page with charts
      hfopt plan train.yaml --keep per_device_train_batch_size --allow optim
      hfopt plan train.yaml --effective-batch 256 --lr-scaling sqrt
      hfopt plan train.yaml --gpu l4 --lock train.lock   keep it for the team; later: is it still the plan?
      hfopt plan train.yaml --for-transformers 4.57      training runs elsewhere, with that version
    """
    where = Outputs(config=config, output=output, json_file=json_file, html_file=html_file, lock=lock, as_diff=as_diff)
    source = config.read_bytes() if lock is not None and config.is_file() else b""
    made = _made(config, _wishes(locals()), quiet=quiet)
    made = _with_deepspeed_beside(made, where.target, written=output is not None and not as_diff)
    edited = made.edited()
    _report(made, edited.stale_comments, where.target, verbose=verbose, quiet=quiet)
    failed = _failed(made)
    locked = lock is None or failed is not None or _as_locked(made, edited.data if where.in_place else source, lock)
    if failed is None and locked and (output is not None or not where.on_stdout):
        write_out(_diff(made, config, edited.data) if as_diff else edited.data, output, like=config)
    _write_others(made, failed, where)
    if failed is not None and json_file == STDOUT:
        print_error(failed)
        raise typer.Exit(failed.exit_code)
    if failed is not None:
        raise failed
    if not locked:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where the answers go: the YAML or the diff, the JSON, the page, the lock."""

    config: Path
    output: Path | None
    json_file: Path | None
    html_file: Path | None
    lock: Path | None
    as_diff: bool

    def __post_init__(self) -> None:
        if len(self.on_stdout) == 2 or (self.on_stdout and self.as_diff):
            raise ConfigError(f"{' and '.join([*self.on_stdout, '--diff'][:2])} both go to stdout", hint="give a file for one of them")
        for file in (self.output, self.lock, self.json_file, self.html_file):
            check_writable(None if file == STDOUT else file)

    @property
    def on_stdout(self) -> list[str]:
        return [name for name, file in (("--json -", self.json_file), ("--html -", self.html_file)) if file == STDOUT]

    @cached_property
    def target(self) -> Path | None:
        """The file that the YAML goes to."""
        return None if self.as_diff else self.output or (None if self.on_stdout else redirected())

    @property
    def in_place(self) -> bool:
        return self.output is not None and self.output.resolve() == self.config.resolve() and not self.as_diff


def _wishes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the parameters of `plan` those that a Request has, each checked."""
    checked = {
        "vram_gib": given["vram"],
        "lengths": numbers("--lengths", given["lengths"], least=ONE_TOKEN),
        "task": task_of(given["task"]),
        "lr_scaling": _scaling(given["lr_scaling"], given["effective_batch"]),
        "keep": known_keys(given["keep"] or []),
        "allow": allowed(given["allow"]),
        "charts": given["html_file"] is not None,
    }
    from hfopt.planner import Request

    return {one.name: given[one.name] for one in fields(Request) if one.name in given} | checked


def _write_others(made: Plan, failed: DryRunError | None, where: Outputs) -> None:
    """A plan whose dry run failed says so beside its figures: one object, and no second one from the error itself."""
    if where.json_file is not None:
        data = made.output()
        if failed is not None:
            data["error"] = error_detail(failed)
        write_out(json_text("plan", data).encode(), None if where.json_file == STDOUT else where.json_file)
    if where.html_file is not None:
        from hfopt.report.plan_page import plan_page

        write_out(plan_page(made.facts, made.charts), None if where.html_file == STDOUT else where.html_file)


def _as_locked(made: Plan, source: bytes, path: Path) -> bool:
    """Locks the plan where it is not; else whether it is the one that was locked, with every difference reported."""
    from hfopt.planner.plan_diff import differences, lock_of, lock_text, read_lock

    found = lock_of(made, source)
    if not path.exists():
        write_out(lock_text(found).encode(), path)
        remark(f"locked in {path}\n")
        return True
    differs = differences(read_lock(path), found)
    for line in differs:
        remark(f"{path}: {line}\n")
    count = f"{len(differs)} difference{'' if len(differs) == 1 else 's'}"
    remark(f"{path}: {count}, no config written; remove the lock to lock this plan\n" if differs else f"as locked in {path}\n")
    return not differs


def _with_deepspeed_beside(made: Plan, target: Path | None, *, written: bool) -> Plan:
    """The commands name the file the YAML goes to. With -o (`written`) the DeepSpeed config becomes a file beside it."""
    choice = made.facts.engine
    if target is None or choice is None:
        return made
    made = made.started_with(str(target))
    if choice.deepspeed is None or not written:
        return made
    beside = target.with_name(f"{target.stem}.deepspeed.json")
    write_out((json.dumps(choice.deepspeed, indent=2) + "\n").encode(), beside)
    return made.with_deepspeed_file(str(beside))


def _made(config: Path, options: dict[str, Any], *, quiet: bool) -> Plan:
    shown = people().status("reading") if sys.stderr.isatty() and not quiet else nullcontext()
    with shown as status:
        from hfopt.planner import Request
        from hfopt.planner.algorithm import make_plan

        request: Request = Request(**options, own_process=True)
        progress = progress_on(status) if status is not None else lambda text: None
        progress("reading")

        def announce(text: str) -> None:
            if not quiet:
                remark(f"{text}\n")

        try:
            return make_plan(config, request, progress=progress, announce=announce)
        except KeyboardInterrupt:
            announce("interrupted before any settings were known to fit: no plan")
            raise


def _failed(made: Plan) -> DryRunError | None:
    """A plan whose own dry run failed is reported, not written: what failed here would fail there."""
    trial = made.facts.trial
    if trial is None or trial.outcome != "error":
        return None
    return DryRunError(
        f"the dry run of the plan failed: {trial.message or 'no message'}; no config was written",
        hint="fix what it names, or plan without it: --no-dry-run",
    )


def _report(made: Plan, stale_comments: tuple[Any, ...], target: Path | None, *, verbose: bool, quiet: bool) -> None:
    """Warnings are said in any case; where there is nothing to say nothing is imported for it."""
    if quiet:
        lines = [("bad", f"WARNING: {warning}") for warning in made.facts.warnings]
    else:
        from hfopt.report.one_screen import plan_lines

        lines = list(plan_lines(made.facts, verbose=verbose, file=None if target is None else str(target)))
        for one in stale_comments:
            lines.append(("stale", f"  line {one.place.line}: the comment still states the old value {one.old_value}: {one.comment}"))
    if not lines:
        return
    from rich.text import Text

    console = people()
    for style, text in lines:
        console.print(Text(text, style=STYLES[style]))


def _diff(made: Plan, config: Path, after: bytes) -> bytes:
    """The reasons as comments, then a unified diff."""
    from difflib import diff_bytes, unified_diff

    from hfopt.redact import printable
    from hfopt.report.text import value_words

    reasons = [f"# {c.key}: {value_words(c.before)} → {value_words(c.after)}: {c.reason}\n".encode() for c in made.facts.changed_lines]
    before, name = config.read_bytes().splitlines(keepends=True), printable(str(config)).encode()
    lines = diff_bytes(unified_diff, before, after.splitlines(keepends=True), name, name + b" (planned)", n=1)
    return b"".join([*reasons, *(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)])


def _scaling(lr_scaling: str, effective_batch: int | None) -> str:
    if lr_scaling not in ("none", "sqrt", "linear"):
        raise ConfigError(f"--lr-scaling {lr_scaling} is not known", hint="one of: none, sqrt, linear")
    if lr_scaling != "none" and effective_batch is None:
        raise ConfigError("--lr-scaling scales with the effective batch", hint="add --effective-batch N")
    return lr_scaling
