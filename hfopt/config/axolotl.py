"""Axolotl's YAML in the words of TrainingArguments and TRL: what it trains, and the key under which each argument is written back.

Source: axolotl 0.18.0 (utils/schemas/{config,training,peft,enums,validation}.py, utils/config/__init__.py,
core/builders/{base,causal,rl}.py, loaders/{model,adapter}.py). Its trainer for supervised tuning is transformers' Trainer with the
model's own loss; `rl` and `reward_model` are TRL's trainers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hfopt.config.lookup import whole_number
from hfopt.config.other_keys import may_change_a_step, not_read
from hfopt.config.other_tools import AXOLOTL_MARKS, ToolSpelling
from hfopt.config.training_arguments import ACCUMULATION, ATTENTION, BATCH
from hfopt.config.translation import Clash, Translation
from hfopt.schema import TrainerKind

NAME = "axolotl"
_SPELLINGS: Mapping[str, ToolSpelling] = {
    BATCH: ToolSpelling(key="micro_batch_size"),
    "per_device_eval_batch_size": ToolSpelling(key="eval_batch_size"),
    "optim": ToolSpelling(key="optimizer"),
    "num_train_epochs": ToolSpelling(key="num_epochs"),
    "lr_scheduler_type": ToolSpelling(key="lr_scheduler"),
    "gradient_checkpointing": ToolSpelling(key="gradient_checkpointing"),
    "fsdp": ToolSpelling(key="fsdp_version", values={True: 2}),
}
_SAME_NAME = (
    *(ACCUMULATION, "learning_rate", "weight_decay", "max_steps", "max_grad_norm", "gradient_checkpointing_kwargs", "torch_compile"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_drop_last", "deepspeed", "fsdp_config"),
    *("accelerator_config", "auto_find_batch_size", "neftune_noise_alpha", "torch_empty_cache_steps", "optim_args"),
)
_NOT_TAKEN = frozenset({"dataloader_persistent_workers", "use_liger_kernel", "eval_accumulation_steps", "ddp_backend"})
"""Arguments that the plan may set and axolotl has no key for."""
_READ_KEYS = frozenset(
    {
        *("base_model", *AXOLOTL_MARKS, *_SAME_NAME, *(spelling.key for spelling in _SPELLINGS.values())),
        *(
            "lora_r",
            "lora_alpha",
            "lora_dropout",
            "lora_target_modules",
            "lora_target_linear",
            "load_in_4bit",
            "load_in_8bit",
            "bf16",
            "fp16",
        ),
        *("tf32", "flash_attention", "datasets", "evals_per_epoch", "saves_per_epoch", "save_steps", "eval_steps", "batch_size", "rl"),
    }
)
_ATTENTION_FLAGS: Mapping[str, str] = {  # the first that is set counts (LEGACY_ATTN_FLAG_TO_IMPL)
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
_TRACED_ATTENTION = ("eager", "sdpa", "flex_attention")
_KEEPS_FLOAT32 = (None, "eager", "sdpa")  # ATTN_IMPLS_WITHOUT_DTYPE_CAST, or none stated
_CUSTOM_OPTIMIZERS = frozenset(
    {
        *("optimi_adamw", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8", "adopt_adamw", "came_pytorch", "muon", "dion", "sinkgd"),
        *("flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion", "q_galore_adamw8bit", "adamw_anyprecision", "lion_pytorch"),
    }
)
_TRAINERS: Mapping[str, TrainerKind] = {
    **{"dpo": "DPO", "ipo": "DPO", "kto": "KTO", "kto_pair": "KTO", "orpo": "ORPO", "simpo": "CPO", "grpo": "GRPO", "gdpo": "GRPO"},
}
_NOT_MODELLED: Mapping[str, str] = {
    "activation_offloading": "what it moves to the host's memory is still counted, so a step takes less than the figures",
    "layer_offloading": "the weights it moves to the host's memory are still counted, so a step takes less than the figures",
    "unfrozen_parameters": "every weight is planned to train, which takes more",
    "lora_target_parameters": "adapters on parameters are not planned, which take more",
    "peft_layers_to_transform": "adapters are planned on every layer, which take more",
    "tiled_mlp": "the MLP is planned whole, which takes more",
    "selective_checkpointing": "whole layers are planned to be recomputed, which takes less memory and more time",
    "lisa_n_layers": "every layer is planned to train, which takes more",
    "fp8": "float8 matmuls are not modelled; the step is planned in its 16-bit precision",
    "qat": "fake quantization is not modelled; its temporaries come on top",
    "quantize_moe_experts": "experts are planned in 16 bits, which takes more",
}
_READ_BESIDE = frozenset(
    {
        *(
            ATTENTION,
            "group_by_length",
            "lora_modules_to_save",
            "tensor_parallel_size",
            "context_parallel_size",
            "sequence_parallel_degree",
        ),
        *("peft_use_rslora", "peft_use_dora", "image_size", "image_resize_algorithm", "bnb_config_kwargs", "adapter"),
    }
)
_SAME_STEP = re.compile(  # of evaluation, of data, of what is saved, of rates
    r"eval_|pad_to_sequence_len|sample_packing_|dataset_|min_sample_len|fan_in_fan_out|resize_token_embeddings|save_|loraplus_|_compile_kwargs"
    r"|_port$|lora_model_dir|lora_on_cpu|layers_attribute|step_interval|bnb_4bit_|excess_length|max_prompt_len"
)
_FREEZING = ("unfrozen_parameters", "lisa_n_layers")
_ADAPTER_WHOLE = "which of the adapter's weights it freezes is not read: all of them are planned to train"
_COUNTS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
_LIGER_LOSS, _CUT_LOSS, _CHUNKED_LOSS = "liger_fused_linear_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy"
_DEFAULT_LENGTH, _DEFAULT_RANK = 512, 8
_FULL_SHARD = "full_shard auto_wrap"


def translate(data: Mapping[str, Any], *, has_bf16: bool = True) -> Translation:
    """`has_bf16`: what `bf16: auto` finds on the card."""
    file = _File(data, has_bf16=has_bf16)
    stands_for_another = file.attention_flag is not None or file.attention not in (None, *_TRACED_ATTENTION)
    kept = frozenset({ATTENTION}) if stands_for_another else frozenset()  # it refuses a flag beside attn_implementation
    return Translation(
        tool=NAME,
        args=file.arguments(),
        spellings={**_SPELLINGS, **{key: ToolSpelling(key=key) for key in (*_SAME_NAME, ATTENTION, "bf16", "fp16", "tf32")}},
        facts=file.facts(),
        trainer=file.trainer,
        uses_trl=file.trainer != "SFT" or file.fuses_like_trl,
        unwritable=_NOT_TAKEN | kept,
        float32_modules=file.float32_modules(),
        notes=tuple(file.notes()),
        clashes=tuple(file.clashes()),
        read_keys=_READ_KEYS,
    )


class _File:
    """One file's values, with axolotl's defaults."""

    def __init__(self, data: Mapping[str, Any], *, has_bf16: bool) -> None:
        self.data = data
        flags = [flag for flag in _ATTENTION_FLAGS if data.get(flag)]
        self.attention_flag = flags[0] if flags else None
        self.bf16, self.fp16 = self._precision(has_bf16)
        self.trainer = self._trainer()

    # ------------------------------------------------------------------------------------------ arguments

    def arguments(self) -> dict[str, Any]:
        """As axolotl would hand them to TrainingArguments; None is left out."""
        data = self.data
        args: dict[str, Any] = {key: data.get(key) for key in _SAME_NAME}
        args |= {
            BATCH: data.get("micro_batch_size") or 1,
            ACCUMULATION: self._accumulation(),
            "per_device_eval_batch_size": data.get("eval_batch_size") or data.get("micro_batch_size") or 1,
            "optim": self._optim(),
            "num_train_epochs": data.get("num_epochs"),
            "bf16": self.bf16,
            "fp16": self.fp16,
            "tf32": data.get("tf32") is True or None,
            "gradient_checkpointing": bool(data.get("gradient_checkpointing")),
            "torch_compile": data.get("torch_compile") is True or None,
            "eval_strategy": self._eval_strategy(),
            "eval_accumulation_steps": self._accumulation(),
            "fsdp": self._fsdp(),
            "fsdp_config": self._fsdp_config(),
            "parallelism_config": self._parallel(),
            "use_liger_kernel": data.get(_LIGER_LOSS) is True or None,
            "train_sampling_strategy": "group_by_length" if data.get("group_by_length") is True else None,
        }
        if args["gradient_checkpointing"] and not isinstance(args["gradient_checkpointing_kwargs"], dict):
            args["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
        return {key: value for key, value in args.items() if value not in (None, "")}

    def _accumulation(self) -> Any:
        stated, total, micro = (self.data.get(key) for key in (ACCUMULATION, "batch_size", "micro_batch_size"))
        whole, per_device = whole_number(total), whole_number(micro) or 1
        return stated or (max(1, whole // per_device) if whole else 1)

    def _optim(self) -> Any:
        stated = self.data.get("optimizer") or "adamw_torch_fused"
        return "adamw_torch" if stated in _CUSTOM_OPTIMIZERS else stated

    def _precision(self, has_bf16: bool) -> tuple[bool, bool]:
        """bf16 and fp16 autocast, as `resolve_dtype` settles them; `bf16: full` is a run in bfloat16 without autocast."""
        bf16, fp16 = self.data.get("bf16", "auto"), self.data.get("fp16") is True
        if bf16 == "auto" and not fp16:
            return (True, False) if has_bf16 else (False, self.data.get("fp16") is None and not self.data.get("float16"))
        return bf16 is True or self.data.get("bfloat16") is True, fp16 and bf16 != "full" and bf16 is not True

    def _weights(self) -> str:
        if self.bf16 or self.data.get("bf16") == "full" or self.data.get("bfloat16"):
            return "bfloat16"
        return "float16" if self.data.get("load_in_8bit") or self.fp16 or self.data.get("float16") else "float32"

    def _eval_strategy(self) -> str | None:
        data = self.data
        if not data.get("test_datasets") and not data.get("val_set_size"):
            return "no"
        if data.get("eval_steps") or data.get("evals_per_epoch"):
            return "steps"
        stated = data.get("eval_strategy") or data.get("evaluation_strategy")
        return stated if isinstance(stated, str) else "no"

    def _fsdp(self) -> Any:
        stated = self.data.get("fsdp")
        return stated if stated else _FULL_SHARD if self.data.get("fsdp_config") else None

    def _fsdp_config(self) -> Any:
        stated = self.data.get("fsdp_config")
        return {str(key).removeprefix("fsdp_"): value for key, value in stated.items()} if isinstance(stated, dict) and stated else None

    def _parallel(self) -> dict[str, int] | None:
        context = self.data.get("context_parallel_size") or self.data.get("sequence_parallel_degree")
        sizes = {"tp_size": whole_number(self.data.get("tensor_parallel_size")), "cp_size": whole_number(context)}
        found = {key: size for key, size in sizes.items() if size is not None and size > 1}
        return found or None

    # ------------------------------------------------------------------------------------------ model and data

    def facts(self) -> dict[str, Any]:
        """What is trained on what, in the words of TRL's scripts."""
        data = self.data
        found: dict[str, Any] = {
            "model_name_or_path": data.get("base_model"),
            "torch_dtype": self._weights(),
            "attn_implementation": "sdpa" if self._is_own_kernel() else self.attention,
            "max_length": data.get("sequence_len") or _DEFAULT_LENGTH,
            "packing": data.get("sample_packing") is True or data.get("pretraining_dataset") is not None,
            "dataset_name": _first_path(data.get("datasets")) or _first_path(data.get("pretraining_dataset")),
            "trust_remote_code": data.get("trust_remote_code") is True,
            "num_labels": data.get("num_labels"),
            "auto_class": data.get("model_type") if isinstance(data.get("model_type"), str) else None,
            **self._adapter(),
            **self._of_trl(),
        }
        if data.get("process_reward_model") is True:
            found |= {"task": "token-classification", "num_labels": data.get("num_labels") or 2}
        if data.get("processor_type") is not None:
            found["image_size"] = data.get("image_size")  # that a processor is named says that samples have images
        else:
            found["text_only"] = True
        return found

    @property
    def attention(self) -> str | None:
        stated = self.data.get(ATTENTION)
        if isinstance(stated, str):
            return stated
        return None if self.attention_flag is None else _ATTENTION_FLAGS[self.attention_flag]

    def _is_own_kernel(self) -> bool:
        """A kernel that axolotl brings (xformers, sage, fp8): traced as PyTorch's own."""
        name = self.attention
        return name is not None and not name.startswith("flash") and "/" not in name and name not in _TRACED_ATTENTION

    def _adapter(self) -> dict[str, Any]:
        data, adapter = self.data, self.data.get("adapter")
        if not adapter:
            return {"use_peft": False}
        linear = data.get("lora_target_linear") is True
        four, eight = data.get("load_in_4bit") is True, data.get("load_in_8bit") is True
        overrides = data.get("bnb_config_kwargs")
        return {
            "use_peft": True,
            "lora_r": data.get("lora_r") or _DEFAULT_RANK,
            "lora_alpha": data.get("lora_alpha"),
            "lora_dropout": data.get("lora_dropout") or 0.0,
            "lora_target_modules": "all-linear" if linear else data.get("lora_target_modules"),
            "lora_modules_to_save": data.get("lora_modules_to_save"),
            "use_dora": data.get("peft_use_dora") is True,
            "use_rslora": data.get("peft_use_rslora") is True,
            "load_in_4bit": four and not eight,
            "load_in_8bit": eight,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": self._weights(),
            **(overrides if isinstance(overrides, dict) else {}),
        }

    def _of_trl(self) -> dict[str, Any]:
        """Keys of TRL's own configs, where its trainer runs."""
        if self.trainer == "SFT":
            return {}
        data, nested = self.data, self.data.get("trl")
        named = {"beta": data.get("rl_beta") or data.get("orpo_alpha"), "precompute_ref_log_probs": data.get("precompute_ref_log_probs")}
        loss = {"ipo": "ipo", "simpo": "simpo"}.get(str(data.get("rl")))
        found = {**named, "loss_type": data.get("dpo_loss_type") or loss, **(nested if isinstance(nested, dict) else {})}
        return {key: value for key, value in found.items() if value is not None}

    def _trainer(self) -> TrainerKind:
        if self.data.get("reward_model") is True:
            return "Reward"
        rl = self.data.get("rl")
        return _TRAINERS.get(rl, "SFT") if isinstance(rl, str) else "SFT"

    @property
    def fuses_like_trl(self) -> bool:
        """A loss that never holds the logits whole, other than Liger's."""
        plugin = any("cut_cross_entropy" in str(name) for name in self.data.get("plugins") or ())
        cut = self.data.get(_CUT_LOSS) is True or (plugin and self.data.get(_CUT_LOSS) is not False)
        return cut or self.data.get(_CHUNKED_LOSS) is True

    def float32_modules(self) -> tuple[str, ...]:
        """Embeddings, head and norms of a whole model in 16 bits go to float32, unless attention needs them narrow or FSDP shards them."""
        whole = not self.data.get("adapter") and self._fsdp() is None and not self.fuses_like_trl
        if not whole or self._weights() == "float32" or self.attention not in _KEEPS_FLOAT32:
            return ()
        return ("norm", "embed_tokens", "lm_head", "embed_in", "embed_out", "word_embeddings")

    # ------------------------------------------------------------------------------------------ what to say

    def notes(self) -> Iterator[str]:
        data = self.data
        if self.float32_modules():
            yield "axolotl keeps embeddings, head and norms in float32 here; with attn_implementation: flash_attention_2 they are 16-bit"
        if data.get("optimizer") in _CUSTOM_OPTIMIZERS:
            yield f"optimizer: {data['optimizer']} is axolotl's own: AdamW's states are planned"
        if self.fuses_like_trl and self.trainer == "SFT":
            yield "the loss without whole logits is planned as TRL's fused head: close, not exact"
        elif self.trainer == "SFT" and data.get(_LIGER_LOSS) is not True:
            yield f"axolotl's own loss holds the logits whole, and so does this estimate; with {_CUT_LOSS}: true, or in TRL, they never are"
        adapter = data.get("adapter")
        if adapter and adapter not in ("lora", "qlora"):
            yield f"adapter: {adapter} is planned as LoRA of rank {data.get('lora_r') or _DEFAULT_RANK}: close, not exact"
        if data.get("gradient_checkpointing") not in (None, True, False, ""):
            yield f"gradient_checkpointing: {data['gradient_checkpointing']} also moves activations to the host: planned as true"
        if self._is_own_kernel():
            yield f"attention {self.attention} is planned as PyTorch's own"
        if any(data.get(key) is True for key in _COUNTS):
            yield "axolotl's fused LoRA kernels are not modelled: a step takes less memory and time than the figures"
        if data.get("rl") is not None and data.get("rl") not in _TRAINERS:
            yield f"rl: {data['rl']} is planned as supervised tuning: what it generates and compares is not counted"
        for key, why in _NOT_MODELLED.items():
            if data.get(key):
                yield f"{key}: {_ADAPTER_WHOLE if adapter and key in _FREEZING else why}"
        if unknown := [key for key, value in data.items() if isinstance(key, str) and self._is_passed_over(key, value)]:
            yield not_read(unknown)

    def _is_passed_over(self, key: str, value: Any) -> bool:
        """A key that nothing here reads and that may change a step. Beside Liger's loss all of its kernels are in the figures."""
        if key.startswith("liger_"):
            return value is True and self.data.get(_LIGER_LOSS) is not True
        named = key in _READ_KEYS | _READ_BESIDE or key in {*_NOT_MODELLED, *_ATTENTION_FLAGS, *_COUNTS, _CUT_LOSS, _CHUNKED_LOSS}
        return not named and not _SAME_STEP.search(key) and may_change_a_step(key, value)

    def clashes(self) -> Iterator[Clash]:
        """What axolotl refuses to start with."""
        data = self.data
        if data.get(ACCUMULATION) and data.get("batch_size"):
            yield Clash(
                key="batch_size", message=f"batch_size and {ACCUMULATION} are both set; axolotl takes one of them", fix="drop batch_size"
            )
        packed = [key for key in ("load_in_4bit", "load_in_8bit") if data.get(key) is True]
        if packed and not data.get("adapter"):
            yield Clash(
                key=packed[0],
                message=f"{packed[0]} without an adapter: packed weights do not train",
                fix="adapter: qlora" if packed[0] == "load_in_4bit" else "adapter: lora",
            )
        if data.get("adapter") == "qlora" and data.get("load_in_4bit") is not True and not data.get("gptq"):
            yield Clash(
                key="adapter", message="adapter is qlora, but load_in_4bit is not true; axolotl refuses that", fix="load_in_4bit: true"
            )
        if isinstance(data.get(ATTENTION), str) and self.attention_flag is not None:
            message = f"{ATTENTION} and {self.attention_flag} are both set; axolotl takes one of them"
            yield Clash(key=self.attention_flag, message=message, fix=f"drop {self.attention_flag}")


def _first_path(datasets: Any) -> str | None:
    first = datasets[0] if isinstance(datasets, list) and datasets else datasets
    path = first.get("path") if isinstance(first, dict) else first
    return path if isinstance(path, str) else None
