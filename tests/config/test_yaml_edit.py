"""An edit replaces the values' own characters and nothing else, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hfopt.config import yaml_edit as edit_module
from hfopt.config.read_job import load_bytes
from hfopt.config.yaml_edit import Edited, edit, upgrade
from hfopt.errors import ConfigError
from hfopt.schema import Change

BATCH = "per_device_train_batch_size"


def edited(text: str, **values: object) -> Edited:
    changes = [Change(key=key, before=None, after=value, reason="a test") for key, value in values.items()]
    return edit(load_bytes(text.encode(), "config.yaml"), changes)


def text_of(text: str, **values: object) -> str:
    return edited(text, **values).data.decode()


def test_no_change_is_the_identity() -> None:
    source = f"\ufeff# é\r\n{BATCH}: 8   \r\n\r\nlearning_rate: 1.0e-5 #x"
    assert edited(source).data == source.encode()
    assert edited(source, **{BATCH: 8}).data == source.encode()
    assert edited(source, seed=None).data == source.encode()
    odd = f"{BATCH}: 0x8  # 8 fits\nsave_steps: 1_000\n"
    same = edited(odd, **{BATCH: 8, "save_steps": 1000})
    assert (same.data, same.stale_comments) == (odd.encode(), ())


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        (f"{BATCH}: 8  # small\nseed: 1", {BATCH: 16}, f"{BATCH}: 16  # small\nseed: 1"),
        (f"{BATCH}: 8\r\nseed: 1", {"bf16": True}, f"{BATCH}: 8\r\nbf16: true\r\nseed: 1"),
        (f"seed: 1\n{BATCH}: 8", {"gradient_accumulation_steps": 2}, f"seed: 1\n{BATCH}: 8\ngradient_accumulation_steps: 2"),
        (f"training:\n    {BATCH}: 8\n", {"bf16": True}, f"training:\n    {BATCH}: 8\n    bf16: true\n"),
        (f"{BATCH}: 8\nfp16: True\n", {"fp16": False}, f"{BATCH}: 8\nfp16: False\n"),
        (f"{{{BATCH}: 8, seed: 1}}\n", {BATCH: 4, "bf16": True}, f"{{{BATCH}: 4, bf16: true, seed: 1}}\n"),
        (f"{BATCH}: 8\noptim: 'adamw_torch'\n", {"optim": "sgd"}, f"{BATCH}: 8\noptim: 'sgd'\n"),
        (f"{BATCH}:    8\n", {BATCH: 16}, f"{BATCH}:    16\n"),
        (f"{BATCH}: 8", {"bf16": True}, f"{BATCH}: 8\nbf16: true"),
        (f"seed: 1\r{BATCH}: 8", {"bf16": True}, f"seed: 1\r{BATCH}: 8\rbf16: true"),
        (f"seed: 1\r\n{BATCH}: 8", {"bf16": True}, f"seed: 1\r\n{BATCH}: 8\r\nbf16: true"),
        (f"{BATCH}: &b 8\nfp16: &f True\n", {"fp16": False}, f"{BATCH}: &b 8\nfp16: False\n"),
        (f"{BATCH}: 8\nlearning_rate:\nseed: 1\n", {"learning_rate": 1e-05}, f"{BATCH}: 8\nlearning_rate: 1.0e-05\nseed: 1\n"),
    ],
)
def test_only_the_values_own_characters_change(before: str, values: dict[str, object], after: str) -> None:
    assert text_of(before, **values) == after


def test_a_value_behind_an_alias_changes_at_its_use() -> None:
    source = f"size: &size 8\ntraining:\n  {BATCH}: *size\n  learning_rate: 0.1\n"
    assert text_of(source, **{BATCH: 4}) == f"size: &size 8\ntraining:\n  {BATCH}: 4\n  learning_rate: 0.1\n"


def test_an_anchor_is_handed_to_its_first_reader() -> None:
    source = f"{BATCH}: &size 8\nper_device_eval_batch_size: *size\nother: *size\n"
    after = text_of(source, **{BATCH: 16})
    assert yaml.safe_load(after) == {BATCH: 16, "per_device_eval_batch_size": 8, "other": 8}


def test_a_merged_value_is_overridden_in_its_section() -> None:
    source = f"base: &base\n  {BATCH}: 8\n  fp16: true\ntraining:\n  <<: *base\n  learning_rate: 0.1\n"
    after = text_of(source, **{BATCH: 16})
    assert yaml.safe_load(after)["training"] == {BATCH: 16, "fp16": True, "learning_rate": 0.1}
    assert yaml.safe_load(after)["base"] == {BATCH: 8, "fp16": True}


def test_a_comment_that_states_the_old_value_is_told() -> None:
    done = edited(f"{BATCH}: 8  # 8 fits on a T4\nseed: 1  # 42\n", **{BATCH: 16, "seed": 2})
    assert [(stale.key, stale.place.line) for stale in done.stale_comments] == [(BATCH, 1)]


def test_a_section_that_is_an_alias_gets_keys_of_its_own() -> None:
    source = f"base: &base\n    {BATCH}: 8\n    learning_rate: 0.1\ntraining: *base\n"
    after = text_of(source, **{BATCH: 4, "bf16": True})
    assert after == source.replace("training: *base", f"training:\n    <<: *base\n    {BATCH}: 4\n    bf16: true")
    spaced = text_of(source.replace("training:", '"training" :'), **{BATCH: 4})
    assert spaced == source.replace("training: *base", f'"training" :\n    <<: *base\n    {BATCH}: 4')


def test_other_aliases_of_a_section_stay_as_they_are() -> None:
    source = f"base: &base\n  {BATCH}: 8\n  seed: 1\nother: *base\ntraining: *base\n"
    done = edit(load_bytes(source.encode(), "c.yaml", section="training"), [Change(key=BATCH, before=8, after=4, reason="a test")])
    assert done.data.decode() == source.replace("training: *base", f"training:\n  <<: *base\n  {BATCH}: 4")


def test_sections_that_merge_a_changed_one_keep_their_value() -> None:
    source = f"training: &t\n  {BATCH}: 8\n  learning_rate: 0.1\nother:\n  <<: *t\n  run: x\nthird: *t\n"
    before, after = yaml.safe_load(source), yaml.safe_load(text_of(source, **{BATCH: 4}))
    assert after["training"] == before["training"] | {BATCH: 4}
    assert (after["other"], after["third"]) == (before["other"], before["third"])


def test_what_cannot_be_kept_apart_is_refused() -> None:
    source = f"training: &t\n  {BATCH}: 8\n  learning_rate: 0.1\nother:\n  <<: *t\n"
    with pytest.raises(ConfigError, match="nothing was changed"):
        edited(source, bf16=True)


def test_an_upgrade_is_made_where_the_key_is_written() -> None:
    source = f"base: &base\n  evaluation_strategy: steps  # often\na:\n  <<: *base\n  {BATCH}: 1\nb:\n  <<: *base\n  {BATCH}: 2\n"
    assert upgrade(load_bytes(source.encode(), "c.yaml")).data.decode() == source.replace("evaluation_strategy", "eval_strategy")


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        (f'"{BATCH}": 8\n"a": "x"\n"b": "y"\n', {"optim": "sgd"}, f'"{BATCH}": 8\n"a": "x"\n"b": "y"\n"optim": "sgd"\n'),
        (f"{BATCH}: 8\nfp16: True\n", {"tf32": True}, f"{BATCH}: 8\nfp16: True\ntf32: True\n"),
        (
            f"{BATCH}:   8\nfp16:                          true\nseed:                          1\n",
            {"bf16": False},
            f"{BATCH}:   8\nfp16:                          true\nbf16:                          false\nseed:                          1\n",
        ),
        (f"t:\n    {BATCH}: 8\n", {"lr_scheduler_kwargs": {"a": 1}}, f"t:\n    {BATCH}: 8\n    lr_scheduler_kwargs:\n        a: 1\n"),
        (
            f'{{\n  "{BATCH}": 8,\n  "seed": 1\n}}',
            {"bf16": True, "optim": "sgd"},
            f'{{\n  "{BATCH}": 8,\n  "bf16": true,\n  "seed": 1,\n  "optim": "sgd"\n}}',
        ),
        (f"{{\n  {BATCH}: 8, # x\n  seed: 1 # y\n}}\n", {"optim": "sgd"}, f"{{\n  {BATCH}: 8, # x\n  seed: 1, # y\n  optim: sgd\n}}\n"),
        (f"{BATCH}: 8\rseed: 1\r", {"bf16": True}, f"{BATCH}: 8\rbf16: true\rseed: 1\r"),
        (f"? {BATCH}\n: 8\n", {"bf16": True}, f"? {BATCH}\n: 8\nbf16: true\n"),
        (f"{BATCH}: 8\nreport_to:\n- wandb\n- none\nseed: 1\n", {"report_to": "none"}, f"{BATCH}: 8\nreport_to: none\nseed: 1\n"),
        (f"{BATCH}: 8\nseed: 1\nseed: 2 # last\n", {"seed": 3}, f"{BATCH}: 8\nseed: 1\nseed: 3 # last\n"),
        (f"{BATCH}: !!int '8'\n", {BATCH: 4}, f"{BATCH}: 4\n"),
        (f"{BATCH}: 8\nreport_to :\n- wandb\nseed: 1\n", {"report_to": "none"}, f"{BATCH}: 8\nreport_to : none\nseed: 1\n"),
        (f"{BATCH}: 8\n", {"lr_scheduler_kwargs": {"a": 1}}, f"{BATCH}: 8\nlr_scheduler_kwargs:\n  a: 1\n"),
        (
            "seed:      1\nfp16:      true\nmax_steps: 3\naccelerator_config:\n  dispatch_batches: true\n",
            {"bf16": False, BATCH: 8},
            f"seed:      1\nfp16:      true\nbf16:      false\n{BATCH}: 8\nmax_steps: 3\naccelerator_config:\n  dispatch_batches: true\n",
        ),
        (
            f"{BATCH}: 8\ngradient_accumulation_steps: 2\n",  # two of one length are no column
            {"seed": 1},
            f"{BATCH}: 8\ngradient_accumulation_steps: 2\nseed: 1\n",
        ),
        (f"{BATCH}: 8\nrun_name: 'x'\n", {"optim": "sgd"}, f"{BATCH}: 8\nrun_name: 'x'\noptim: sgd\n"),  # one string is no habit
        (f"{BATCH}: 8\nx: &t TRUE\nfp16: True\n", {"tf32": False}, f"{BATCH}: 8\nx: &t TRUE\nfp16: True\ntf32: False\n"),
        (f'{{"{BATCH}": 8, seed: 1}}', {"optim": "sgd"}, f'{{"{BATCH}": 8, seed: 1, optim: sgd}}'),  # not JSON
        (f'{{"{BATCH}": 8}}', {"run_name": "é"}, f'{{"{BATCH}": 8, "run_name": "é"}}'),
        (f"{BATCH}: 8\n", {"run_name": "é: " + "long " * 40}, f'{BATCH}: 8\nrun_name: "é: {"long " * 40}"\n'),
        (f"{{\n  {BATCH}: 8,\n  seed: 1}}\n", {"optim": "sgd"}, f"{{\n  {BATCH}: 8,\n  seed: 1,\n  optim: sgd}}\n"),
        (f"{BATCH}: 8\nrun_name: |-\n  a\n  b\n\n# c\nseed: 1\n", {"run_name": "x"}, f"{BATCH}: 8\nrun_name: x\n\n# c\nseed: 1\n"),
    ],
)
def test_the_files_own_habits_are_kept(before: str, values: dict[str, object], after: str) -> None:
    assert text_of(before, **values) == after


KWARGS = "gradient_checkpointing_kwargs"


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ("\n  use_reentrant: true  # why\n  old: 1\n", {"use_reentrant": False, "n": 2}, "\n  use_reentrant: false  # why\n  n: 2\n"),
        (" {use_reentrant: true, old: 1}\n", {"use_reentrant": True, "n": 1}, " {use_reentrant: true, n: 1}\n"),
        (" {use_reentrant: true, old: 1}\n", {"use_reentrant": True}, " {use_reentrant: true}\n"),
        (" {old: 1}\n", {"use_reentrant": True}, " {use_reentrant: true}\n"),
        ("\n  old: 1\nseed: 1\n", {"use_reentrant": True}, " {use_reentrant: true}\nseed: 1\n"),
        (" {}\n", {"use_reentrant": True}, " {use_reentrant: true}\n"),
    ],
)
def test_a_mapping_changes_key_by_key_where_the_two_share_one(before: str, wanted: dict[str, object], after: str) -> None:
    assert text_of(f"{BATCH}: 8\n{KWARGS}:{before}", **{KWARGS: wanted}) == f"{BATCH}: 8\n{KWARGS}:{after}"


@pytest.mark.parametrize(
    ("before", "gone", "after"),
    [
        (f"{BATCH}: 8\nseed: &s 3 # x\ndata_seed: *s\n", "seed", f"{BATCH}: 8\ndata_seed: &s 3\n"),
        (f"{BATCH}: 8\nseed: &s 3\n", "seed", f"{BATCH}: 8\n"),
        (f"stages:\n- fp16: true\n  {BATCH}: 8\n  seed: 1\n", "fp16", f"stages:\n- {BATCH}: 8\n  seed: 1\n"),
        (f"training:\n  {BATCH}: 8\nother: 1\n", BATCH, "training:\n  {}\nother: 1\n"),
        (f"fp16: true\n{BATCH}: 8", BATCH, "fp16: true"),
        (f"fp16: true\r\n{BATCH}: 8", BATCH, "fp16: true"),
        (f"fp16: true\nseed: 1\nseed: 2\n{BATCH}: 8\n", "seed", f"fp16: true\n{BATCH}: 8\n"),
        (f"\ufefffp16: true\n{BATCH}: 8\n", "fp16", f"\ufeff{BATCH}: 8\n"),
        (f"{{fp16: true, {BATCH}: 8, seed: 1}}", "seed", f"{{fp16: true, {BATCH}: 8}}"),
        (f"{{fp16: true, {BATCH}: 8, seed: 1}}", "fp16", f"{{{BATCH}: 8, seed: 1}}"),
        (f"{{fp16: true, {BATCH}: 8}}", "fp16", f"{{{BATCH}: 8}}"),
        (f"{BATCH}: 8\n", "seed", f"{BATCH}: 8\n"),
    ],
)
def test_a_key_goes_with_its_line_and_nothing_else(before: str, gone: str, after: str) -> None:
    assert text_of(before, **{gone: None}) == after


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        (f"{{\n  {BATCH}: 8,\n  seed: 1,\n}}\n", {"optim": "sgd"}, f"{{\n  {BATCH}: 8,\n  seed: 1,\n  optim: sgd,\n}}\n"),
        (
            f"{{base: &b {{{BATCH}: 8, learning_rate: 0.1}}, training: *b}}\n",
            {BATCH: 4, "bf16": True},
            f"{{base: &b {{{BATCH}: 8, learning_rate: 0.1}}, training: {{<<: *b, {BATCH}: 4, bf16: true}}}}\n",
        ),
        (
            f"all: {{base: &b {{{BATCH}: 8, learning_rate: 0.1}}}}\nruns:\n  one: {{training: *b}}\n",
            {BATCH: 4},
            f"all: {{base: &b {{{BATCH}: 8, learning_rate: 0.1}}}}\nruns:\n  one: {{training: {{<<: *b, {BATCH}: 4}}}}\n",
        ),
        (
            f"{BATCH}: 8\nfp16: TRUE\nbf16: Yes\ntf32: off\n",
            {"fp16": False, "bf16": False, "tf32": True},
            f"{BATCH}: 8\nfp16: FALSE\nbf16: No\ntf32: on\n",
        ),
        (f"{BATCH}: 8\nlearning_rate: 5e-5\n", {"learning_rate": 5e-5}, f"{BATCH}: 8\nlearning_rate: 5.0e-5\n"),  # a string to YAML
        (f"{BATCH}: 8\nlearning_rate: 5e-5\n", {"learning_rate": 3e-5}, f"{BATCH}: 8\nlearning_rate: 3.0e-05\n"),
        (f"{BATCH}: 8\nlearning_rate: 1\n", {"learning_rate": float("inf")}, f"{BATCH}: 8\nlearning_rate: .inf\n"),
        (f"{BATCH}: 8\nlearning_rate: 1\n", {"learning_rate": float("-inf")}, f"{BATCH}: 8\nlearning_rate: -.inf\n"),
        (f"{BATCH}: 8\nlearning_rate: 1\n", {"learning_rate": float("nan")}, f"{BATCH}: 8\nlearning_rate: .nan\n"),
        (f"{BATCH}: 8\nrun_name: a\n", {"run_name": "2024-99-99"}, f'{BATCH}: 8\nrun_name: "2024-99-99"\n'),  # no date, but YAML tries
        (f"{BATCH}: 8\nrun_name: a\n", {"run_name": "2024-01-01"}, f'{BATCH}: 8\nrun_name: "2024-01-01"\n'),
        (f"{BATCH}: 8\nrun_name: 'a'\n", {"run_name": "it's"}, f"{BATCH}: 8\nrun_name: 'it''s'\n"),
        (f"{BATCH}: 8\nrun_name: 'a'\n", {"run_name": "x\n"}, f'{BATCH}: 8\nrun_name: "x\\n"\n'),
    ],
)
def test_a_value_is_written_as_the_file_would(before: str, values: dict[str, object], after: str) -> None:
    assert text_of(before, **values) == after


def test_a_key_for_a_section_that_is_empty() -> None:
    loaded = load_bytes(b"training: {}\nother: 1\n", "c.yaml", section="training")
    done = edit(loaded, [Change(key="bf16", before=None, after=True, reason="a test")])
    assert done.data == b"training: {bf16: true}\nother: 1\n"


def test_what_touches_the_same_place_or_names_no_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="two changes touch the same place; nothing was changed"):
        edited(f"training:\n  {BATCH}: 8\n", **{BATCH: None, "bf16": True})
    with pytest.raises(ConfigError, match="several sections hold TrainingArguments") as refused:
        edited(f"a:\n  {BATCH}: 8\nb:\n  {BATCH}: 4\n", bf16=True)
    assert refused.value.hint == "name one with --section"


def test_llama_factory_is_written_in_its_own_words() -> None:
    source = f"{BATCH}: 8\nfinetuning_type: full\n"
    assert text_of(source, gradient_checkpointing=False) == f"{source}disable_gradient_checkpointing: true\n"
    assert text_of(source, use_liger_kernel=True) == f"{source}enable_liger_kernel: true\n"


@pytest.mark.slow
def test_hf_argument_parser_accepts_what_comes_out(tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    source = (
        "model_name_or_path: x\noutput_dir: out\nevaluation_strategy: no\nlearning_rate: 5e-5\n"
        "warmup_ratio: 0.1\noverwrite_output_dir: yes\n"
        f"group_by_length: true\noptim: adamw_hf\nlogging_dir: logs\nuse_cpu: true\nreport_to: none\n{BATCH}: '8'\n"
    )
    first = upgrade(load_bytes(source.encode(), "c.yaml"))
    changes = [Change(key=key, before=None, after=value, reason="") for key, value in {BATCH: 4, "gradient_accumulation_steps": 2}.items()]
    path = tmp_path / "c.yaml"
    path.write_bytes(edit(load_bytes(first.data, "c.yaml"), changes).data)
    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path), allow_extra_keys=True)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 2)
    assert (arguments.learning_rate, arguments.get_warmup_steps(1000), arguments.eval_strategy.value) == (5e-5, 100, "no")


def test_a_sum_about_the_batch_that_comes_out_false_is_told() -> None:
    source = (
        f"# per device batch of 8, because\n# 9 is too much\n{BATCH}: 8\ngradient_accumulation_steps: 4\n  # Effective batch = 8 * 4 = 32\n"
        "run_name: |\n  # batch = 8 * 4\nseed: 8 # 9\n"
    )
    told = edited(source, **{BATCH: 16, "gradient_accumulation_steps": 2}).stale_comments
    assert [(stale.key, stale.place.line) for stale in told] == [(BATCH, 5), (BATCH, 1), ("gradient_accumulation_steps", 5)]


@pytest.mark.parametrize(
    ("comment", "told"),
    [
        (f"# {BATCH} of 8, no more", True),
        ("# a batch on each device: 8", True),  # two words of the key
        ("# size per card: 8", True),
        ("# a batch of 8", False),  # one word may mean anything
        ("# 8 it is", False),
        (f"# {BATCH} of 8, no more\n", False),  # a blank line between
        (f"# {BATCH} of 8\n# and so on", True),
    ],
)
def test_a_comment_above_is_about_a_key_that_it_names(comment: str, told: bool) -> None:
    done = edited(f"seed: 1\n{comment}\n{BATCH}: 8\n# 8 below\n", **{BATCH: 16})
    assert [stale.place.line for stale in done.stale_comments] == ([2] if told else [])


def test_a_short_word_of_a_key_names_nothing_and_a_sum_of_batches_is_about_batches() -> None:
    source = f"# lr of type cosine\nlr_scheduler_type: cosine\n# batch = 8 * 4\nseed: 8\n{BATCH}: 2\n"
    assert edited(source, lr_scheduler_type="linear", seed=9).stale_comments == ()


def test_a_scripts_own_key_is_left_to_the_script() -> None:
    source = f"{BATCH}: 8\noptimizer: AdamW\nlr: 0.1\n"
    assert text_of(source, optim="sgd", learning_rate=0.2) == f"{BATCH}: 8\noptimizer: AdamW\nlr: 0.2\noptim: sgd\n"


def test_a_repair_that_cannot_be_made_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    known = edit_module.apply

    def tied(document: Any, operations: Any) -> Any:
        if any(operation.key == "evaluation_strategy" for operation in operations):
            raise ConfigError("anchors tie these values together")
        return known(document, operations)

    monkeypatch.setattr(edit_module, "apply", tied)
    source = b"per_device_train_batch_size: 4\nevaluation_strategy: steps\nweight_decay: 1e-2\nlearning_rate: 5e-5\n"
    upgraded = edit_module.upgrade(load_bytes(source, "c.yaml")).data.decode()
    assert "evaluation_strategy: steps\n" in upgraded
    assert yaml.safe_load(upgraded)["weight_decay"] == 0.01 and yaml.safe_load(upgraded)["learning_rate"] == 5e-5


def test_what_would_not_parse_any_more_is_not_written_and_a_new_key_is_written_where_it_is_asked_for() -> None:
    document = load_bytes(b"per_device_train_batch_size: 4\nseed: 1\n", "c.yaml").document
    with pytest.raises(ConfigError, match="cannot be edited safely"):
        edit_module._verified(b"seed: [", {"seed": 1}, document)
    new = edit_module.Operation(path=(), key="bf16", after=True)
    assert edit_module._where_defined(document, [new]) == [new]
