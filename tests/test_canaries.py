"""What hfopt borrows from the inside of other packages, by package: an upgrade that takes one away fails here, with the whole list.

`NAMES` are functions, classes and attributes that are no public promise or that hfopt replaces; `SIGNATURES` are parameters it relies on;
`TEXTS` are lines of installed sources that it reads; `PROBES` ask objects for private attributes. The last test finds private names that
hfopt uses and nobody has named here.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hfopt.compat.versions import is_at_least, package_version, source_folder

HFOPT = Path(__file__).parent.parent / "hfopt"
Table = Mapping[str, tuple[str, ...]]

NAMES: Mapping[str, Table] = {  # package -> who in hfopt relies on it -> what
    "torch": {
        "compat/torch_patches": (
            "torch._inductor.output_code.CompiledFxGraph",
            "torch._inductor.runtime.triton_heuristics.CachingAutotuner.run",
            "torch._inductor.runtime.triton_heuristics.CachingAutotuner.precompile",
            "torch._dynamo.utils.counters",
            "torch._dynamo.reset",
            "torch.backends.cuda.matmul.allow_tf32",
            "torch.backends.cudnn.allow_tf32",
            "torch.nn.Module.register_parameter",
            "torch.utils.swap_tensors",
            "torch.distributions.Distribution._validate_args",
            "torch.nn.functional.linear",
            "torch.UntypedStorage.resize_",
            "torch._C._distributed_c10d._unregister_process_group",
            *(
                f"torch.distributed.distributed_c10d.{name}"
                for name in (
                    *("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag"),
                    *("_World", "_world", "_group_count"),
                )
            ),
        ),
        "compat/fast_import": (
            *(f"torch._dynamo.{name}" for name in ("disable", "allow_in_graph", "assume_constant_result", "graph_break")),
            *(f"torch._dynamo.source.{name}" for name in ("ConstantSource", "RandomValueSource")),
            "torch.distributed.tensor.DTensor",
            "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
            "torch.nn.attention.flex_attention.BlockMask",
            "torch.nn.attention.flex_attention._DEFAULT_SPARSE_BLOCK_SIZE",
            "torch.utils._sympy.functions.Max",
            *(f"torch.fx.experimental.symbolic_shapes.{name}" for name in ("expect_true", "guard_or_false", "sym_and", "sym_or", "sym_eq")),
        ),
        "model/builder": (
            "torch._subclasses.fake_tensor.FakeTensorMode",
            "torch.utils._python_dispatch._disable_current_modes",
            "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        ),
        "model/losses": ("torch.nn.modules.batchnorm._BatchNorm",),
        "trace/trainer_step": ("torch._foreach_add_",),
        "oom/left_behind": ("torch._foreach_norm",),
        "trace/recorder": (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.nn.modules.module.register_module_forward_hook",
            "torch.nn.modules.module.register_module_forward_pre_hook",
            "torch._C._autograd._get_sequence_nr",
            "torch._C._current_autograd_node",
            "torch._C._storage_Use_Count",
            "torch.Tensor._use_count",
            "torch.ops.aten._local_scalar_dense",
        ),
        "trace/fake_tensors": (
            "torch._subclasses.fake_tensor.FakeTensor",
            "torch._C._DisableTorchDispatch",
            "torch._C._PreserveDispatchKeyGuard",
            "torch._C._set_meta_in_tls_dispatch_include",
            "torch._C._set_throw_on_mutable_data_ptr",
            "torch.Tensor._make_subclass",
        ),
        "trace/cuda_choices": (
            "torch._C.DispatchKey.AutocastCPU",
            "torch._C.DispatchKeySet",
            "torch._C._ExcludeDispatchKeyGuard",
            "torch._C._dispatch_get_registrations_for_dispatch_key",
            "torch.library._scoped_library",
            "torch.utils._pytree.tree_map_only",
            "torch.ops.aten._softmax",
            "torch.ops.aten._log_softmax",
            "torch.ops.aten._scaled_dot_product_attention_math",
            "torch.ops.aten._scaled_dot_product_flash_attention",
            "torch.ops.aten._scaled_dot_product_efficient_attention",
        ),
        "trace/cuda_allocations": (
            "torch.ops.aten._foreach_norm",
            "torch.ops.aten._log_softmax_backward_data",
            "torch.ops.aten._softmax_backward_data",
            "torch.ops.aten._ctc_loss",
            "torch.ops.aten._ctc_loss_backward",
            "torch.ops.aten._scaled_dot_product_flash_attention_backward",
            "torch.ops.aten._scaled_dot_product_efficient_attention_backward",
        ),
        "trace/fsdp": (
            "torch._C._dispatch_has_kernel_for_dispatch_key",
            "torch.testing._internal.distributed.fake_pg.FakeStore",
            "torch.cpu._default_cpu_stream",
            "torch.cpu._current_stream",
        ),
        "oom/rank_vote": ("torch.nn.parallel.DistributedDataParallel._pre_forward",),
        "site/sitecustomize": ("torch.cuda._lazy_call",),
        "virtual/site/hfopt_virtual_values": (
            "torch._C.DisableTorchFunction",
            "torch.optim.Optimizer.profile_hook_step",
            "torch.optim.Optimizer.zero_grad",
            "torch.nn.utils.clip_grad_norm_",
            "torch.nn.parallel.distributed._verify_param_shape_across_processes",
            "torch.utils.weak.WeakTensorKeyDictionary",
            "torch.library.register_kernel",
            "torch.overrides._get_current_function_mode",
        ),
        "probe/compiled_worker": (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.cuda.memory._record_memory_history",
            "torch.cuda.memory._snapshot",
            "torch.compiler.set_stance",
        ),
        "virtual/site/hfopt_virtual_compiler": (
            "torch.compile",
            "torch._dynamo.eval_frame.OptimizeContext",
            "torch.overrides._get_current_function_mode",
            "torch.overrides._pop_mode_temporarily",
        ),
        "virtual/site/hfopt_rehearsal_journal": (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch",
            "torch.utils.data._utils.fetch._IterableDatasetFetcher.fetch",
        ),
        "virtual/site/hfopt_virtual_objects": tuple(
            f"torch.distributed.distributed_c10d.{name}"
            for name in ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
        ),
    },
    "transformers": {
        "compat/fast_import": (
            "transformers.utils.is_scipy_available",
            "transformers.utils.is_datasets_available",
            "transformers.utils.is_torch_distributed_available",
            "transformers.loss.loss_utils",
        ),
        "compat/model_names": (
            "transformers.utils.import_utils.create_import_structure_from_path",
            "transformers.utils.import_utils.spread_import_structure",
            "transformers.utils.import_utils._LazyModule.__getattr__",
            *(f"transformers.{name}" for name in ("_class_to_module", "_modules", "_objects", "_object_missing_backend")),
            "transformers._import_structure",
        ),
        "compat/transformers_patches": (
            "transformers.trainer_callback.TrainerState.load_from_json",
            "transformers.Trainer.create_accelerator_and_postprocess",
            "transformers.PreTrainedModel._supports_sdpa",
        ),
        "launch/attach": ("transformers.trainer.Trainer",),
        "model/builder": ("transformers.modeling_layers.GradientCheckpointingLayer", "transformers.PreTrainedModel._from_config"),
        "model/from_trainer": ("transformers.Trainer._get_collator_with_removed_columns",),
        "model/sources": ("transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
        "model/custom_code": ("transformers.dynamic_module_utils.get_class_from_dynamic_module",),
        "monitor/metrics": (
            "transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK",
            "transformers.trainer_callback.CallbackHandler",
        ),
        "oom/evaluation_batches": ("transformers.trainer_pt_utils.nested_concat",),
        "oom/micro_batch": ("transformers.Trainer._prepare_inputs", "transformers.Trainer.compute_loss_context_manager"),
        "planner/engines": ("transformers.PreTrainedModel._no_split_modules",),
        "trace/trainer_step": (
            "transformers.optimization.Adafactor",
            *(f"transformers.trainer_pt_utils.{name}" for name in ("get_parameter_names", "LabelSmoother")),
        ),
        "virtual/site/hfopt_rehearsal_files": (
            "transformers.Trainer._save_checkpoint",
            "transformers.Trainer._load_best_model",
            "transformers.modeling_utils.PreTrainedModel.save_pretrained",
        ),
    },
    "accelerate": {
        "compat/transformers_patches": (
            "accelerate.state.AcceleratorState._reset_state",
            *(f"accelerate.state.{kind}._shared_state" for kind in ("PartialState", "AcceleratorState", "GradientState")),
        ),
        "launch/apply_plan": ("accelerate.utils.TorchDynamoPlugin",),
        "oom/micro_batch": ("accelerate.Accelerator.backward", "accelerate.Accelerator.no_sync", "accelerate.Accelerator.unwrap_model"),
        "trace/fsdp": ("accelerate.utils.FullyShardedDataParallelPlugin", "accelerate.utils.fsdp_utils.fsdp2_prepare_model"),
    },
    "typer": {
        "compat/fast_import": (
            "typer.core._TyperParameter.get_runtime_param",
            "typer.core._TyperParameter.process_value",
            "typer.models.ParameterInfo",
        ),
    },
    "peft": {
        "model/builder": ("peft.get_peft_model", "peft.LoraConfig", "peft.LoraConfig._register_custom_module"),
        "model/quantize": ("peft.tuners.lora.layer.Linear._cast_input_dtype", "peft.utils.integrations.dequantize_module_weight"),
        "virtual/site/hfopt_rehearsal_files": ("peft.peft_model.PeftModel.save_pretrained",),
    },
    "trl": {
        "job/live_trainer": tuple(f"trl.{kind}Trainer" for kind in ("SFT", "DPO", "GRPO", "Reward", "KTO")),
        "oom/micro_batch": ("trl.SFTTrainer.compute_loss",),
        "trace/fused_head": tuple(
            f"trl.kernels.chunked_logprob.{name}"
            for name in ("_use_triton", "_addmm_fp32", "_MM_OUT_DTYPE", "TOKEN_CHUNK_SIZE", "ChunkedLogProbFunction")
        ),
    },
    "datasets": {
        "model/samples": ("datasets.IterableDataset.take",),
        "job/live_trainer": ("datasets.IterableDataset.num_shards",),
    },
    "safetensors": {"virtual/site/hfopt_rehearsal_files": ("safetensors.torch.save_file",)},
    "liger_kernel": {"launch/apply_plan": ("liger_kernel.transformers._apply_liger_kernel_to_instance",)},
    "triton": {
        "virtual/site/hfopt_virtual_compiler": (
            "triton.runtime.jit.JITFunction.run",
            "triton.runtime.autotuner.Autotuner.run",
            "triton.backends.compiler.GPUTarget",
        )
    },
}

SIGNATURES: Mapping[str, Table] = {  # package -> function -> parameters that must be there, in this order
    "torch": {
        "torch.nn.Module.register_parameter": ("self", "name", "param"),
        "torch.utils.swap_tensors": ("t1", "t2"),
        "torch.nn.parallel.DistributedDataParallel.forward": ("self", "inputs", "kwargs"),
    },
    "transformers": {
        "transformers.Trainer.__init__": ("self", "model", "args"),
        "transformers.Trainer.train": ("self", "resume_from_checkpoint", "trial"),
        "transformers.Trainer.get_batch_samples": ("self", "epoch_iterator", "num_batches"),
        "transformers.Trainer.training_step": ("self", "model", "inputs", "num_items_in_batch"),
        "transformers.Trainer.prediction_step": ("self", "model", "inputs", "prediction_loss_only", "ignore_keys"),
        "transformers.Trainer.compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
        "transformers.PreTrainedModel.gradient_checkpointing_enable": ("self", "gradient_checkpointing_kwargs"),
        "transformers.trainer_callback.TrainerState.load_from_json": ("json_path",),
    },
    "accelerate": {
        "accelerate.Accelerator.backward": ("self", "loss"),
        "accelerate.Accelerator.no_sync": ("self", "model"),
        "accelerate.utils.fsdp_utils.fsdp2_prepare_model": ("accelerator", "model"),
    },
}

TEXTS: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]] = {  # package -> file -> (from which version on, pattern)
    "transformers": {
        "training_args.py": (
            ("0", r"^class TrainingArguments\b"),
            ("4.56", r'^\s*default_optim = "adamw_torch_fused"$'),
            ("5", r"^    use_cache:"),
            ("0", r"^    per_device_train_batch_size: int = field\("),
        ),
        "modeling_utils.py": (("0", r"^class AttentionInterface\b"), ("0", r"^    _global_mapping = \{$")),
        "training_args_seq2seq.py": (("0", r"^class Seq2SeqTrainingArguments\b"),),
        "trainer_utils.py": (("0", r"^class SaveStrategy\(ExplicitEnum\):$"), ("0", r"^class IntervalStrategy\(ExplicitEnum\):$")),
    },
    "trl": {
        "trainer/base_config.py": (
            ("1.0", r"gradient_checkpointing: bool = field\(\s*default=True"),
            ("1.0", r"self\.bf16 = not \(self\.fp16\)"),
        ),
    },
    "torch": {"version.py": (("0", r"^__version__\b[^=\n]*= '"), ("0", r"^cuda\b[^=\n]*= "))},
    "liger_kernel": {"transformers/monkey_patch.py": (("0", r"^MODEL_TYPE_TO_APPLY_LIGER_FN = \{"),)},
}


class _Named(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}


@cache
def _trainer() -> Any:
    import tempfile

    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    args = transformers.TrainingArguments(output_dir=tempfile.gettempdir(), use_cpu=True, report_to=[])
    return transformers.Trainer(model=transformers.LlamaForCausalLM(config), args=args, train_dataset=_Named())


def _trainer_source() -> str:
    return Path(import_module("transformers.trainer").__file__ or "").read_text()


def _node() -> Any:
    return (torch.ones(1, requires_grad=True) * 2).grad_fn


def _resize_is_inherited() -> bool:
    """hfopt takes its patch away by `del`: the class must not have a method of its own."""
    return "resize_" not in vars(torch.UntypedStorage)


def _hooks_are_kept() -> bool:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    parameter.register_hook(lambda _: None)
    return bool(parameter._post_accumulate_grad_hooks and parameter._backward_hooks)


def _compiled_names_its_model() -> bool:
    model = torch.nn.Linear(1, 1)
    return torch.compile(model, backend="eager")._orig_mod is model


PROBES: Mapping[str, Mapping[str, Callable[[], Any]]] = {  # package -> what is asked -> True or the value that must not be missing
    "torch": {
        "Module._parameters, _buffers, _modules": lambda: all(
            isinstance(getattr(torch.nn.Linear(1, 1), name), dict) for name in ("_parameters", "_buffers", "_modules")
        ),
        "RNNBase._flat_weights, _flat_weights_names": lambda: (
            len(torch.nn.LSTM(1, 1)._flat_weights) == len(torch.nn.LSTM(1, 1)._flat_weights_names)
        ),
        "iter(DataLoader)._num_yielded": lambda: vars(iter(torch.utils.data.DataLoader([1, 2])))["_num_yielded"] == 0,
        "Tensor._version": lambda: torch.ones(1).add_(1)._version == 1,
        "UntypedStorage._cdata": lambda: isinstance(torch.ones(1).untyped_storage()._cdata, int),
        "UntypedStorage.resize_ is inherited": _resize_is_inherited,
        "OpOverload._schema, _overloadpacket": lambda: (
            torch.ops.aten.add.Tensor._schema.name == "aten::add" and torch.ops.aten.add.Tensor._overloadpacket is torch.ops.aten.add
        ),
        "Node._sequence_nr()": lambda: isinstance(_node()._sequence_nr(), int),
        "Parameter._post_accumulate_grad_hooks, _backward_hooks": _hooks_are_kept,
        "OptimizedModule._orig_mod": _compiled_names_its_model,
        "DTensor._local_tensor": lambda: "_local_tensor" in import_module("torch.distributed.tensor").DTensor.__slots__,
        "GradScaler._init_scale": lambda: torch.amp.GradScaler("cpu")._init_scale,
        "_cuda_getArchFlags, of a build for CUDA": lambda: not torch.version.cuda or hasattr(torch._C, "_cuda_getArchFlags"),
    },
    "transformers": {
        "Trainer._train_batch_size": lambda: _trainer()._train_batch_size == _trainer().args.train_batch_size,
        "Trainer._initial_global_step stands for rates of the steps that were run": lambda: (
            ("self._initial_global_step" in _trainer_source()) == ("num_train_samples * num_steps_trained" in _trainer_source())
        ),
        "PreTrainedConfig._attn_implementation, _name_or_path": lambda: (
            _trainer().model.config._attn_implementation == "sdpa" and _trainer().model.config._name_or_path == ""
        ),
        "Trainer.model_accepts_loss_kwargs": lambda: isinstance(_trainer().model_accepts_loss_kwargs, bool),
        "Trainer.compute_loss_func, label_names, callback_handler": lambda: all(
            hasattr(_trainer(), name) for name in ("compute_loss_func", "label_names", "callback_handler", "is_fsdp_enabled")
        ),
        "Trainer._loss_shifts_labels or the mapping of causal models": lambda: (
            hasattr(_trainer(), "_loss_shifts_labels") or "LlamaForCausalLM" in _causal_models()
        ),
        "utils.import_utils.enable_tf32, or torch's own flags before 5": lambda: (
            not is_at_least("transformers", "5") or hasattr(import_module("transformers.utils.import_utils"), "enable_tf32")
        ),
    },
    "accelerate": {
        "Accelerator._models": lambda: isinstance(_trainer().accelerator._models, list),
        "Accelerator.ddp_handler": lambda: hasattr(_trainer().accelerator, "ddp_handler"),
    },
    "numpy": {"random.mtrand._rand._bit_generator": lambda: import_module("numpy").random.mtrand._rand._bit_generator is not None},
}
SINCE: Mapping[str, str] = {  # of names that the oldest versions allowed do not have yet: a version of the package that has them
    "datasets.IterableDataset.num_shards": "4.0",
    "torch.fx.experimental.symbolic_shapes.guard_or_false": "2.8",
    "torch.fx.experimental.symbolic_shapes.sym_and": "2.8",
    "torch.fx.experimental.symbolic_shapes.sym_or": "2.8",
    "transformers.modeling_layers.GradientCheckpointingLayer": "4.54",
    "transformers.utils.is_torch_distributed_available": "5.0",
    "typer.core._TyperParameter.get_runtime_param": "0.27",
    "typer.core._TyperParameter.process_value": "0.27",
}
OWN = frozenset({"_fields", "_exit", "_getframe", "_current_frames", "_run_exitfuncs"})
"""Python's own, documented or as old as Python: namedtuple, os, sys, atexit."""
PACKAGES = sorted({*NAMES, *SIGNATURES, *TEXTS, *PROBES})
INSTALLED = [name for name in PACKAGES if find_spec(name) is not None]


def _causal_models() -> Any:
    return import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def resolved(dotted: str) -> Any:
    """The object of that name, whose first parts are modules."""
    parts = dotted.split(".")
    value, rest = import_module(parts[0]), parts[1:]
    for index, name in enumerate(rest):
        try:
            value = getattr(value, name)
        except AttributeError:
            value = import_module(".".join(parts[: index + 2]))
    return value


def missing(package: str) -> Iterator[str]:
    for user, names in NAMES.get(package, {}).items():
        for name in names:
            if name in SINCE and not is_at_least(package.replace("_", "-"), SINCE[name]):
                continue
            try:
                resolved(name)
            except (AttributeError, ImportError, RuntimeError) as error:
                yield f"{name} (hfopt/{user}): {error}"
    for name, wanted in SIGNATURES.get(package, {}).items():
        found = list(inspect.signature(resolved(name)).parameters)
        if [parameter for parameter in found if parameter in wanted] != list(wanted) or found[: len(wanted) - 1] != list(wanted[:-1]):
            yield f"{name}({', '.join(found)}): hfopt expects {', '.join(wanted)}"
    for file, patterns in TEXTS.get(package, {}).items():
        folder = source_folder(package)
        assert folder is not None
        source = (folder / file).read_text(encoding="utf-8") if (folder / file).is_file() else ""
        for since, pattern in patterns:
            if is_at_least(package.replace("_", "-"), since) and re.search(pattern, source, re.MULTILINE) is None:
                yield f"{package}/{file} has no line like {pattern}"
    for what, probe in PROBES.get(package, {}).items():
        try:
            if not probe():
                yield what
        except (AttributeError, TypeError, ImportError) as error:
            yield f"{what}: {error}"


@pytest.mark.parametrize("package", INSTALLED)
def test_what_hfopt_borrows_is_still_there(package: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gone = list(missing(package))
    version = package_version(package.replace("_", "-"))
    assert not gone, f"{package} {version} no longer has what hfopt relies on:\n  " + "\n  ".join(gone)


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names of objects that are not the module's own `self`, and private imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = node.value
            of = of.func if isinstance(of, ast.Call) else of
            own = isinstance(of, ast.Name) and of.id in ("self", "cls", "super")
            yield from () if own else (node.attr,)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("hfopt") and node.module != "__future__":
            yield from (*node.module.split("."), *(alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            yield from (str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant))


def defined_here(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def test_every_private_name_is_named_here() -> None:
    """A new one gets its canary with the code that uses it."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(HFOPT.rglob("*.py"))}
    ours = {name for tree in trees.values() for name in defined_here(tree)} | OWN
    named = set(re.findall(r"\b_[A-Za-z]\w*", Path(__file__).read_text()))
    unnamed = [
        f"{path.relative_to(HFOPT)}: {name}"
        for path, tree in trees.items()
        for name in dict.fromkeys(private_names(tree))
        if name.startswith("_") and not name.startswith("__") and name not in ours and name not in named
    ]
    assert not unnamed, "private names of other packages without a canary:\n  " + "\n  ".join(unnamed)


def test_who_relies_on_a_name_is_a_module_of_today() -> None:
    users = {user for table in NAMES.values() for user in table}
    assert {user for user in users if not (HFOPT / f"{user}.py").exists()} == set()


def test_a_missing_name_a_changed_signature_and_a_lost_line_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "torch", {"somewhere": ("torch._no_such_thing", "torch.nn.Linear")})  # type: ignore[index]
    monkeypatch.setitem(SIGNATURES, "torch", {"torch.utils.swap_tensors": ("t1", "t3")})  # type: ignore[index]
    monkeypatch.setitem(TEXTS, "torch", {"version.py": (("0", "^no such line$"), ("99", "^of the future$"))})  # type: ignore[index]
    monkeypatch.setitem(PROBES, "torch", {"a lie": lambda: False})  # type: ignore[index]
    gone = list(missing("torch"))
    assert [line.split()[0] for line in gone] == ["torch._no_such_thing", "torch.utils.swap_tensors(t1,", "torch/version.py", "a"]
