"""The Trainer's own optimizer step as a script for the tracer: what transformers' `_run_epoch` and `training_step` do, with its optimizer.

Two optimizer steps are run, because the first has no optimizer state yet. With accumulation, each step runs two micro-batches: the
first starts without gradients, the second with them, and all further ones are like the second. All the window's batches are on the
device at once, as `get_batch_samples` fetches them.

The states bitsandbytes' optimizers keep, by its rules (`facts/argument_effects.py`), without bitsandbytes: bytes, not arithmetic. What
is paged is not counted. The update kernels work in place.

On CUDA torch.optim takes the foreach implementation unless told otherwise; fake parameters live on the CPU, so it is asked for by name.
bitsandbytes needs a card even to be imported fully, so its states are imitated (`bitsandbytes_states`). What is neither is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hfopt.errors import TraceError
from hfopt.facts.argument_effects import BLOCK_8BIT, SMALLEST_8BIT, SMALLEST_PAGED, bitsandbytes_states
from hfopt.model.losses import CASTS_ONCE, REFERENCE
from hfopt.schema import StepSettings, why_not_scaled
from hfopt.trace.tracer import TraceSession


class BitsAndBytes(torch.optim.Optimizer):  # type: ignore[misc]
    """Allocates at its first step what bitsandbytes would, and nothing afterwards. Its update is one kernel per parameter that goes through
    weight, gradient and states; here two kernels stand for it, which together move as many bytes."""

    def __init__(self, model: Any, groups: list[dict[str, Any]], optim: str) -> None:
        known = bitsandbytes_states(optim)
        assert known is not None, f"{optim} is not one of bitsandbytes'"
        self._states = known
        self._embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        super().__init__(groups, {"lr": 5e-5})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self._start(parameter)
                    parameter.add_(parameter.grad.view_as(parameter))
                    states = [value for name, value in self.state[parameter].items() if name.startswith("state")]
                    if states:
                        torch._foreach_add_(states, 0)

    def _start(self, parameter: torch.Tensor) -> None:
        eight = self._states.eight_bit and parameter.numel() >= SMALLEST_8BIT and parameter not in self._embeddings
        paged = self._states.paged and parameter.numel() >= SMALLEST_PAGED
        state = self.state[parameter]
        state["step"] = 0
        for number in range(self._states.count):
            if not paged:
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.uint8 if eight else torch.float32)
            if eight:
                state[f"absmax{number}"] = torch.zeros(-(-parameter.numel() // BLOCK_8BIT), dtype=torch.float32)


_FOREACH = {"adamw_torch": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD}
_LR = 5e-5


def parameter_groups(model: Any) -> list[dict[str, Any]]:
    """Trainer.create_optimizer: weights that decay, then norms and biases that do not."""
    from transformers.trainer_pt_utils import get_parameter_names

    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    try:
        decaying = set(get_parameter_names(model, [torch.nn.LayerNorm], patterns))
    except TypeError:  # transformers < 4.52 takes no patterns
        decaying = {name for name in get_parameter_names(model, [torch.nn.LayerNorm]) if "bias" not in name}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trained if name in decaying]},
        {"params": [parameter for name, parameter in trained if name not in decaying], "weight_decay": 0.0},
    ]


def make_optimizer(model: Any, optim: str, optim_args: str | None = None, *, groups: list[dict[str, Any]] | None = None) -> Any:
    """The optimizer for the Trainer's `optim` (over `groups`, where a rank holds only parts of the weights); raises TraceError for one
    that cannot be traced, by name."""
    groups = parameter_groups(model) if groups is None else groups
    if not any(group["params"] for group in groups):
        raise TraceError("no parameter of the model is trained", hint="check `frozen` and the adapter's target modules")
    if optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, lr=_LR, fused=True)
    if optim == "adamw_hf":  # transformers' own, gone in 5.x: a loop over the parameters
        return torch.optim.AdamW(groups, lr=_LR, foreach=False)
    if optim in _FOREACH:
        return _FOREACH[optim](groups, lr=_LR, foreach=True, **_options(optim_args, optim))
    if optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=_LR, scale_parameter=False, relative_step=False)
    if bitsandbytes_states(optim) is not None:
        return BitsAndBytes(model, groups, optim)
    traced = ", ".join(sorted((*_FOREACH, "adamw_torch_fused", "adafactor")))
    raise TraceError(f"optim {optim!r} cannot be traced", hint=f"traced are {traced} and those of bitsandbytes (8-bit, paged, lion)")


def _options(optim_args: str | None, optim: str) -> dict[str, Any]:
    """Only what changes the state: momentum keeps a buffer, centered keeps another."""
    pairs = dict(item.split("=", 1) for item in (optim_args or "").replace(" ", "").split(",") if "=" in item)
    options: dict[str, Any] = {}
    if "momentum" in pairs and optim in ("sgd", "rmsprop"):
        options["momentum"] = float(pairs["momentum"])
    if optim == "rmsprop" and pairs.get("centered", "").lower() in ("true", "1", "yes"):
        options["centered"] = True
    return options


_AUTOCAST_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16}


def trainer_script(
    settings: StepSettings, compute_loss: Callable[[Any, dict[str, Any]], Any] | None = None, *, steps: int = 2
) -> Callable[[TraceSession], None]:
    def script(session: TraceSession) -> None:
        loop_class(settings)(session, settings, compute_loss).run(steps)

    return script


def loop_class(settings: StepSettings) -> type[TrainerLoop]:
    """The loop of one device, or of one rank of several."""
    if settings.sharding is None:
        return TrainerLoop
    from hfopt.trace.rank_step import LOOPS

    return LOOPS[settings.sharding.engine]


class TrainerLoop:
    """What the Trainer holds while it trains; `run` is `_run_epoch`."""

    micro_batches = 2  # of a window that are run at the most

    def __init__(self, session: TraceSession, settings: StepSettings, compute_loss: Callable[[Any, dict[str, Any]], Any] | None) -> None:
        self.session, self.settings, self._compute_loss = session, settings, compute_loss
        self.model = session.model
        self.autocast_dtype = _AUTOCAST_DTYPE.get(settings.precision)
        self.scaler = torch.amp.GradScaler("cpu") if settings.precision == "fp16" else None
        self.accepts_loss_kwargs = _accepts_loss_kwargs(self.model)
        self.smoother = _label_smoother(settings)

    def run(self, steps: int) -> Any:
        """Some optimizer steps; returns the optimizer, which holds its state."""
        recorder = self.session.recorder
        recorder.phase = "forward"
        total_loss = torch.zeros(())
        self.begin()
        optimizer = self.make_optimizer()
        for step in range(steps):
            last = step == steps - 1
            recorder.mark(f"step_{step}")
            self.before_step(step)
            window = [self._fetched(step, number) for number in range(self.settings.accumulation)]
            items = self.count_items(window)
            recorder.costing = last
            for micro, inputs in enumerate(window[: self.micro_batches]):
                recorder.mark(f"step_{step}_micro_{micro}")
                recorder.costing = last and micro == 0
                with self.micro_batch(is_last=micro == min(self.settings.accumulation, self.micro_batches) - 1):
                    loss = self._training_step(inputs, items)
                torch.isnan(loss)
                torch.isinf(loss)
                total_loss += loss
            recorder.costing = last
            with self.session.phase("optimizer"):
                norm = self._optimizer_step(optimizer)  # noqa: F841 - the Trainer holds it until the next step
            self.zero_grad()
        recorder.mark("end")
        recorder.costing = False
        return optimizer

    def _fetched(self, step: int, number: int) -> dict[str, Any]:
        self.session.recorder.mark(f"fetch_{step}_{number}")
        return self.session.to_device()

    # ------------------------------------------------------------------------------------------ what a rank of several does otherwise

    def begin(self) -> None:
        """Before the optimizer is made."""

    def before_step(self, step: int) -> None:
        """Before the first micro-batch of a step."""

    def micro_batch(self, *, is_last: bool) -> Any:
        """Around one micro-batch."""
        return contextlib.nullcontext()

    def make_optimizer(self) -> Any:
        return make_optimizer(self.model, self.settings.optim, self.settings.optim_args)

    def updated_parameters(self) -> list[torch.Tensor]:
        """What the optimizer updates and clipping looks at."""
        return list(self.model.parameters())

    def zero_grad(self) -> None:
        self.model.zero_grad()

    # ------------------------------------------------------------------------------------------ one micro-batch

    def count_items(self, window: list[dict[str, Any]]) -> Any:
        if not self.accepts_loss_kwargs or any(not isinstance(batch.get("labels"), torch.Tensor) for batch in window):
            return None
        return sum(batch["labels"].ne(-100).sum() for batch in window)

    def _training_step(self, inputs: dict[str, Any], items: Any) -> torch.Tensor:
        recorder = self.session.recorder
        first_block = recorder.next_block
        with self.session.phase("forward"):
            loss = self.compute_loss(inputs, items)
            if items is None or not self.accepts_loss_kwargs:
                loss = loss / self.settings.accumulation
            loss = loss / 1
            scaled = self.scaler.scale(loss) if self.scaler else loss
        recorder.classify_live(first_block, "activations")
        with self.session.phase("backward"):
            scaled.backward()
        recorder.classify((p.grad for p in self.model.parameters()), "gradients")
        return loss.detach()

    def compute_loss(self, inputs: dict[str, Any], items: Any) -> torch.Tensor:
        loss: torch.Tensor = self.loss_and_outputs(inputs, items)[0]
        return loss

    def loss_and_outputs(self, inputs: dict[str, Any], items: Any) -> tuple[Any, Any]:
        """`compute_loss` with `return_outputs`; a loss of its own keeps its outputs to itself (None)."""
        inputs = dict(inputs)
        if self._compute_loss is not None:
            with self._autocast_forwards():
                return self._compute_loss(self.model, inputs), None
        labels = inputs.pop("labels") if self.smoother is not None and "labels" in inputs else None
        if labels is not None and "decoder_input_ids" not in inputs and (shifted := _decoder_inputs(self.model, labels)) is not None:
            inputs["decoder_input_ids"] = shifted
        if self.accepts_loss_kwargs and items is not None:
            inputs["num_items_in_batch"] = items
        outputs = self.forward(inputs)
        self._classify_logits(outputs)
        if labels is not None:
            counted = {"num_items_in_batch": items} if _counts_items(self.smoother) else {}
            return self.smoother(outputs, labels, shift_labels=_shifts_labels(self.model), **counted), outputs
        return outputs["loss"] if isinstance(outputs, dict) else outputs[0], outputs

    def forward(self, inputs: dict[str, Any]) -> Any:
        return self.converted(lambda: self.model(**inputs))

    def converted(self, forward: Callable[[], Any]) -> Any:
        """A forward as accelerate wraps it: under autocast, with outputs in float32."""
        with self._autocast():
            outputs = forward()
        return self._in_float32(outputs)

    def _autocast(self) -> Any:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self.autocast_dtype)

    @contextlib.contextmanager
    def _autocast_forwards(self) -> Iterator[None]:
        """As accelerate prepares a model and its reference: autocast inside their forwards, not in the loss around them."""
        with contextlib.ExitStack() as stack:
            for module in (self.model, getattr(self.model, REFERENCE, None)):
                if module is not None and self.autocast_dtype is not None:
                    stack.enter_context(self._autocast_forward(module))
            yield

    @contextlib.contextmanager
    def _autocast_forward(self, module: Any) -> Iterator[None]:
        forward, own = module.forward, vars(module).get("forward")

        @functools.wraps(forward)
        def cast(*args: Any, **kwargs: Any) -> Any:
            with self._autocast(), _unfrozen(module):
                return self._in_float32(forward(*args, **kwargs))

        module.forward = cast
        try:
            yield
        finally:
            if own is None:
                del module.forward
            else:
                module.forward = own

    def _in_float32(self, outputs: Any) -> Any:
        """accelerate's convert_outputs_to_fp32 around the model's forward."""
        if self.autocast_dtype is None:
            return outputs
        return _float32(outputs)

    def _classify_logits(self, outputs: Any) -> None:
        logits = outputs.get("logits") if isinstance(outputs, dict) else None
        self.session.recorder.classify([logits], "logits")

    def _optimizer_step(self, optimizer: Any) -> torch.Tensor:
        recorder = self.session.recorder
        first_block = recorder.next_block
        if self.scaler is not None:
            if any(one.grad is not None and one.grad.dtype == torch.float16 for one in self.updated_parameters()):
                raise TraceError(str(why_not_scaled("float16")), hint="load the model in float32 (dtype: float32)")
            self.scaler.unscale_(optimizer)
        limit = self.settings.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.updated_parameters(), limit if limit > 0 else float("inf"), foreach=True)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        recorder.classify_live(first_block, "optimizer")
        return norm


@contextlib.contextmanager
def _unfrozen(module: Any) -> Iterator[None]:
    """A reference whose weights were never frozen, though no gradient is asked of them: autocast keeps its casts of such."""
    if not vars(module).get(CASTS_ONCE, False):
        yield
        return
    module.requires_grad_(True)
    try:
        yield
    finally:
        module.requires_grad_(False)


def _float32(value: Any) -> Any:
    """accelerate.utils.convert_to_fp32, whose import would cost a second: half-precision tensors in lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, (tuple, list)):
        made = [_float32(item) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, Mapping):
        kind: Any = type(value)
        return kind({key: _float32(item) for key, item in value.items()})
    return value


def _accepts_loss_kwargs(model: Any) -> bool:
    """Trainer.model_accepts_loss_kwargs: the forward of the model (of the base model under peft) takes **kwargs."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    declared = getattr(base, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(base.forward).parameters.values())


def _decoder_inputs(model: Any, labels: torch.Tensor) -> Any:
    """A collator makes them: with label smoothing the Trainer takes the labels away that the model would shift itself. Where the model
    has no method for it (Whisper), the user's own collator must; what it makes has the labels' shape."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return prepare(labels=labels)
    return labels.clamp(min=0) if getattr(base.config, "is_encoder_decoder", False) else None


def _label_smoother(settings: StepSettings) -> Any:
    if not settings.label_smoothing:
        return None
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(epsilon=settings.label_smoothing)


def _counts_items(smoother: Any) -> bool:
    """That of transformers 4 takes the mean over its own micro-batch."""
    return "num_items_in_batch" in inspect.signature(smoother.__call__).parameters


def _shifts_labels(model: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
