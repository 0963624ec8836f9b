"""Each trait of real configs is found, with the repair where one is certain, and what is right raises no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from versions import needs_5

import hfopt.config.read_job
from hfopt.config.read_job import Loaded, load_bytes
from hfopt.config.yaml_edit import upgrade
from hfopt.facts.training_keys import Installed, installed, read
from hfopt.schema import Problem

BASE = "per_device_train_batch_size: 4\nlearning_rate: 1.0e-4\n"


def loaded(text: str) -> Loaded:
    return load_bytes((BASE + text).encode(), "c.yaml")


def only(text: str) -> Problem:
    (problem,) = loaded(text).problems
    return problem


@pytest.mark.parametrize(
    ("text", "code", "severity", "upgraded"),
    [
        ("evaluation_strategy: steps", "renamed_key", "error", {"eval_strategy": "steps"}),
        ("evaluation_strategy: no", "renamed_key", "error", {"eval_strategy": "no"}),
        ("eval_strategy: off", "bool_as_string", "error", {"eval_strategy": "no"}),
        ("weight_decay: 1e-2", "number_as_string", "error", {"weight_decay": 0.01}),
        ("max_steps: '100'", "number_as_string", "error", {"max_steps": 100}),
        ("max_steps: 100.0", "wrong_type", "warning", {"max_steps": 100}),
        ("bf16: 'false'", "bool_as_string", "error", {"bf16": False}),
        ("fp16: 1", "bool_as_string", "warning", {"fp16": True}),
        ("optim: adamw_hf", "removed_value", "error", {"optim": "adamw_torch"}),
        pytest.param("per_gpu_eval_batch_size: 2", "renamed_key", "error", {"per_device_eval_batch_size": 2}, marks=needs_5),
    ],
)
def test_findings_with_a_certain_repair(text: str, code: str, severity: str, upgraded: dict[str, object]) -> None:
    read_in = loaded(text)
    (problem,) = read_in.problems
    assert (problem.code, problem.severity) == (code, severity)
    assert problem.place is not None and problem.place.line == 3
    edited = upgrade(read_in)
    assert yaml.safe_load(edited.data) == {"per_device_train_batch_size": 4, "learning_rate": 1e-4} | upgraded
    assert load_bytes(edited.data, "c.yaml").problems == ()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("max_steps: null", "null_value"),
        ("max_steps: many", "wrong_type"),
        ("save_total_limit: [1]", "wrong_type"),
        ("lr_scheduler_type: cosin", "unknown_value"),
        ("hub_model_id: None", "none_as_string"),
        ("num_train_epochs: ${epochs}", "unresolved"),
        ("num_train_epochs: '{{ epochs }}'", "unresolved"),
        ("fp16: true\nbf16: true", "conflict"),
        ("dataloader_prefetch_factor: 2", "conflict"),
        ("load_best_model_at_end: true\nsave_strategy: epoch", "conflict"),
        ("gradient_acumulation_steps: 4", "unknown_key"),
        ("seed: 1\nseed: 2", "duplicate_key"),
        ("hub_token: hf_abcdefghijklmnopqrstu", "secret"),
        ("weight_decay: .nan", "bad_value"),
    ],
)
def test_findings_for_the_user(text: str, code: str) -> None:
    assert only(text).code == code


@pytest.mark.parametrize(("value", "wanted"), [("0", "at least 1"), ("-4", "at least 1"), ("99999999999999999999", "below 2147483648")])
@pytest.mark.parametrize("key", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_a_count_is_told_the_bound_that_it_passes(key: str, value: str, wanted: str) -> None:
    assert f"{key} is {value}; it must be {wanted}" in [problem.message for problem in loaded(f"{key}: {value}").problems]


@pytest.mark.parametrize(
    "text",
    [
        "report_to: none",
        "report_to: [wandb, tensorboard]",
        "save_steps: 0.05\nsave_total_limit: null",
        "output_dir: 0x10\nrun_name: 2024",
        "tf32: null\nresume_from_checkpoint: null\ndisable_tqdm: null",
        "eval_strategy: 'no'\nsave_strategy: \"no\"",
        "fsdp: true\ndeepspeed: {zero_optimization: {stage: 2}}",
        "gradient_checkpointing_kwargs: {use_reentrant: false}\nlr_scheduler_kwargs: '{}'",
        'chat_template: "{% for message in messages %}{{ message }}{% endfor %}"\ndataset_num_proc: 8',
        "# evaluation_strategy: steps\nmax_steps: -1",
        "seeds: [1, 2, 3]\nmy_script_option: 5\neval_epochs: 3\nlabel_smoothing: 0.1",
        "gradient_accumulation_steps: 0b10\nseed: 1_000",
    ],
)
def test_what_is_right_raises_no_alarm(text: str) -> None:
    assert loaded(text).problems == ()


def test_a_misspelt_key_is_told_with_the_real_one() -> None:
    assert only("gradient_acumulation_steps: 4").fix == "did you mean gradient_accumulation_steps?"


def test_a_section_of_nothing_but_arguments_takes_no_others() -> None:
    text = "training_args:\n  per_device_train_batch_size: 4\n  my_own: 1\n"
    assert [problem.key for problem in load_bytes(text.encode(), "c.yaml").problems] == ["my_own"]


def test_aliases_are_named_and_read() -> None:
    read_in = load_bytes(b"training:\n  batch_size: 4\n  lr: 1.0e-4\n  epochs: 2\n", "c.yaml")
    assert read_in.job is not None
    assert read_in.job.raw == {"per_device_train_batch_size": 4, "learning_rate": 1e-4, "num_train_epochs": 2}
    assert {(problem.code, problem.severity) for problem in read_in.problems} == {("alias", "note")}
    assert "per_device_train_batch_size" in read_in.problems[0].message


def test_grpo_batches_that_do_not_divide() -> None:
    text = (BASE + "num_generations: 6\ngradient_accumulation_steps: 2\n").encode()
    (problem,) = load_bytes(text, "c.yaml").problems
    assert problem.code == "not_divisible" and problem.fix is not None and "multiple of 3" in problem.fix
    assert load_bytes(text, "c.yaml", world_size=3).problems == ()


@pytest.mark.parametrize(
    ("text", "world", "found"),
    [
        ("num_generations: 4\ngeneration_batch_size: 12", 1, ("generation_batch_size", "not_divisible", "generation_batch_size: 8")),
        ("num_generations: 4\ngeneration_batch_size: 24", 3, None),
        ("num_generations: 5\ngeneration_batch_size: 16", 1, ("generation_batch_size", "not_divisible", None)),
        ("num_generations: 4\ngeneration_batch_size: 8\nsteps_per_generation: 2", 1, ("generation_batch_size", "conflict", "drop one")),
        ("num_generations: 1", 1, ("num_generations", "bad_value", "num_generations: 8")),
        ("num_generations: 8\nper_device_train_batch_size: 8\neval_strategy: steps\nper_device_eval_batch_size: 8", 1, None),
        (
            "num_generations: 8\nper_device_train_batch_size: 8\neval_strategy: steps\nper_device_eval_batch_size: 4",
            1,
            ("per_device_eval_batch_size", "not_divisible", "per_device_eval_batch_size: 8"),
        ),
        ("num_generations: 8\nauto_find_batch_size: true", 1, ("auto_find_batch_size", "conflict", "drop the line")),
        ("desirable_weight: 1.0\nper_device_train_batch_size: 1", 1, ("per_device_train_batch_size", "bad_value", "2, with half")),
        ("desirable_weight: 1.0\nloss_type: apo_zero_unpaired\nper_device_train_batch_size: 1", 1, None),
        pytest.param(
            "desirable_weight: 1.0\ntrain_sampling_strategy: random",
            1,
            ("train_sampling_strategy", "conflict", "sequential"),
            marks=needs_5,
        ),
        ("packing: false\npadding_free: true\nmax_length: 128", 1, ("padding_free", "conflict", "packing: true")),
        ("packing: true\npadding_free: true\nmax_length: 128", 1, None),
    ],
)
def test_what_trl_refuses_together(text: str, world: int, found: tuple[str, str, str | None] | None) -> None:
    base = "" if "per_device_train_batch_size" in text else "per_device_train_batch_size: 8\n"
    problems = load_bytes(f"{base}learning_rate: 1.0e-4\n{text}\n".encode(), "c.yaml", world_size=world).problems
    if found is None:
        assert problems == ()
        return
    (problem,) = problems
    key, code, fix = found
    assert (problem.key, problem.code) == (key, code)
    assert problem.fix is None if fix is None else fix in (problem.fix or "")


def test_no_finding_shows_a_token() -> None:
    secret = "hf_" + "Zq9" * 10
    read_in = loaded(f"push_to_hub_token: {secret}\nhub_token: {secret}\nlr_scheduler_type: {secret}\nwarmup_ratio: {secret}\n")
    assert read_in.job is not None and secret not in repr(read_in.job)
    assert secret not in repr(read_in.problems)


def test_a_number_that_its_tool_converts_is_no_error() -> None:
    assert {problem.severity for problem in loaded("weight_decay: 1e-2\nfinetuning_type: full\n").problems} == {"note"}
    assert {problem.severity for problem in loaded("weight_decay: 1e-2\npacking: true\n").problems} == {"warning"}


@needs_5
def test_the_ratio_of_warmup_becomes_steps_unless_steps_were_in_force() -> None:
    def after(text: str) -> dict[str, object]:
        return {key: value for key, value in yaml.safe_load(upgrade(loaded(text)).data).items() if key.startswith("warmup")}

    assert after("warmup_ratio: 0.1\n") == {"warmup_steps": 0.1}
    assert after("warmup_ratio: 0.1\nwarmup_steps: 0\n") == {"warmup_steps": 0.1}
    assert after("warmup_ratio: 0.1\nwarmup_steps: 50\n") == {"warmup_steps": 50}
    assert after("warmup_ratio: 1.0\n") == {"warmup_ratio": 1.0}


OLD = '''
@dataclass
class TrainingArguments:
    """Words."""

    framework = "pt"
    per_device_train_batch_size: int = field(default=8, metadata={"help": "x"})
    gradient_accumulation_steps: int = field(default=1)
    learning_rate: float = field(default=5e-5)
    warmup_ratio: float = field(default=0.0)
    warmup_steps: int = field(default=0)
    eval_strategy: Union[IntervalStrategy, str] = field(default="no")
    group_by_length: bool = field(default=False)
    _n_gpu: int = field(init=False)
    default_optim = "adamw_torch"
    optim: Union[OptimizerNames, str] = field(default=default_optim)

    def __post_init__(self):
        other: int = 3
'''


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    (tmp_path / "training_args.py").write_text(
        'class OptimizerNames(ExplicitEnum):\n    """x"""\n\n    ADAMW_TORCH = "adamw_torch"\n' + OLD
    )
    (tmp_path / "trainer_utils.py").write_text('class IntervalStrategy(ExplicitEnum):\n    NO = "no"\n    STEPS = "steps"\n\n\nX = "y"\n')
    (tmp_path / "training_args_seq2seq.py").write_text(
        "class Seq2SeqTrainingArguments(TrainingArguments):\n    sortish_sampler: bool = field()\n"
    )
    present = read(tmp_path, "4.51.3")
    monkeypatch.setattr(hfopt.config.read_job, "installed", lambda: present)
    return present


def test_the_installed_source_says_what_exists(older: Installed) -> None:
    batch = {"per_device_train_batch_size", "gradient_accumulation_steps", "group_by_length"}
    assert set(older.fields) == batch | {"learning_rate", "warmup_ratio", "warmup_steps", "eval_strategy", "optim"}
    assert older.fields["eval_strategy"].choices == ("no", "steps")
    assert older.fields["per_device_train_batch_size"].default == 8
    assert older.fields["warmup_steps"].kinds == {"int"}


def test_what_is_outdated_depends_on_what_is_installed(older: Installed) -> None:
    text = BASE + "warmup_ratio: 0.1\ngroup_by_length: true\nevaluation_strategy: steps\ntrain_sampling_strategy: random\n"
    found = {problem.key: problem.code for problem in load_bytes(text.encode(), "c.yaml").problems}
    assert found == {"evaluation_strategy": "renamed_key", "train_sampling_strategy": "newer_key"}


def test_the_real_installed_transformers_is_read() -> None:
    present = installed()
    assert {"per_device_train_batch_size", "optim", "report_to", "deepspeed", "do_train"} <= set(present.fields)
    assert len(present.fields) > 100
    assert "adamw_torch" in present.fields["optim"].choices and "cosine" in present.fields["lr_scheduler_type"].choices


def test_the_values_of_a_scripts_own_keys_are_its_own() -> None:
    text = "batch_size: 4\noptimizer: AdamW\nscheduler: cosine_warmup\nuse_gradient_checkpointing: selective\nnum_train_epochs: 1\n"
    read_in = load_bytes(text.encode(), "c.yaml")
    assert [(problem.code, problem.key) for problem in read_in.problems] == [("alias", "batch_size")]
    assert read_in.job is not None and read_in.job.raw == {"per_device_train_batch_size": 4, "num_train_epochs": 1}


@pytest.mark.parametrize(
    ("section", "beside", "severity"),
    [("training", "lora_rank: 8", "warning"), ("training", "packing: true", "error"), ("training_args", "lora_rank: 8", "error")],
)
def test_a_section_with_keys_of_no_class_is_read_by_a_script(section: str, beside: str, severity: str) -> None:
    text = f"model: x/y\n{section}:\n  per_device_train_batch_size: 2\n  warmup_ratio: 0.1\n  {beside}\n"
    (found,) = [problem for problem in load_bytes(text.encode(), "c.yaml").problems if problem.key == "warmup_ratio"]
    assert found.severity == severity


def test_the_fix_is_yaml_that_can_be_copied() -> None:
    assert only("evaluation_strategy: no").fix == 'eval_strategy: "no"'


def test_a_gone_key_that_asks_for_nothing_is_dropped() -> None:
    assert b"sharded_ddp" not in upgrade(loaded("sharded_ddp: ''\n")).data
    assert loaded("sharded_ddp: simple\n").problems[0].fix is None, "what it asked for is the user's to say anew"


def test_a_key_under_a_scripts_own_name_is_not_offered_for_another() -> None:
    def offered(text: str) -> list[str | None]:
        loaded = load_bytes(f"model: m\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-4\n{text}\n".encode(), "c.yaml")
        return [problem.fix for problem in loaded.problems if problem.key == "min_epochs"]

    assert offered("min_epochs: 1.0") == ["did you mean num_train_epochs?"]
    assert offered("epochs: 10\nmin_epochs: 1.0") == []


def test_a_root_that_only_a_script_can_read_keeps_the_keys_that_the_script_reads() -> None:
    keys = "per_device_train_batch_size: 1\nlearning_rate: 1.0e-4\nwarmup_ratio: 0.1\nbeta: 0.1\nmax_length: 256\nmax_prompt_length: 128\n"
    own = load_bytes(f"model_name: gpt2\ndpo_file: d.jsonl\n{keys}".encode(), "dpo.yaml")
    assert not [item for item in own.found if item.repair]
    assert "it stays for the script" in next(one.message for one in own.problems if one.key == "warmup_ratio")
    trl = load_bytes(f"model_name_or_path: gpt2\ndataset_name: d\n{keys}".encode(), "dpo.yaml")
    assert "warmup_ratio" in {item.problem.key for item in trl.found if item.repair}
