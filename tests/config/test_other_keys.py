"""Keys of other tools that change a step and stand in no figure are said, and so are those nobody knows."""

from __future__ import annotations

from hfopt.config.read_job import load_bytes

FACTORY = "model_name_or_path: x\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\ncutoff_len: 512\n"
BATCH = "per_device_train_batch_size: 2\n"


def said(text: str) -> tuple[str, ...]:
    return load_bytes(f"{text}{BATCH}".encode(), "c.yaml").unread


def test_what_another_tool_does_is_named() -> None:
    (fp8,) = said(FACTORY + "fp8: true\nfp8_backend: te\n")
    assert fp8.startswith("fp8: true is set; 8-bit matrix products are not modelled")
    (loss,) = said(FACTORY + "use_dft_loss: true\n")
    assert loss.startswith("use_dft_loss: true is set; it is planned as the usual cross-entropy")
    (depths,) = said(FACTORY + "mixture_of_depths: convert\n")
    assert "mixture_of_depths: convert" in depths
    assert said(FACTORY + "fp8: false\nmixture_of_depths: null\ntensor_model_parallel_size: 1\n") == ()


def test_devices_in_a_file_are_not_those_that_are_planned_for() -> None:
    assert said("model_name: gpt2\nnum_gpus: 1\n") == ()
    assert said("model_name: gpt2\nnum_gpus: 8\n") == ("num_gpus: 8 is set; how many devices train is said by --num-gpus, not by the file",)


def test_a_reward_model_among_the_functions_is_named() -> None:
    grpo = "model_name_or_path: x/y\nnum_generations: 8\n"
    assert said(f"{grpo}reward_funcs: [accuracy_reward]\n") == ()
    (model,) = said(f"{grpo}reward_funcs: [accuracy_reward, org/rm]\n")
    assert model.startswith("reward_funcs: org/rm is set; what another model than the trained one holds on the card")
    (sized,) = said(f"{grpo}reward_funcs: [len_7_chars, skywork-qwen3-8b]\n")
    assert sized.startswith("reward_funcs: skywork-qwen3-8b is set")


def test_keys_with_the_same_effect_share_a_sentence() -> None:
    (one,) = said(FACTORY + "pipeline_model_parallel_size: 4\nexpert_model_parallel_size: 2\n")
    assert "pipeline_model_parallel_size: 4, expert_model_parallel_size: 2 are set" in one


def test_a_key_nobody_knows_is_listed() -> None:
    assert said("model_name: gpt2\nsparse_attention_blocks: 16\n") == ("not read, so in no figure: sparse_attention_blocks",)
    many = said("model_name: gpt2\n" + "".join(f"knob_{letter}: 7\n" for letter in "abcdefghij"))
    assert many[0].endswith("knob_h and 2 more")


def test_a_key_about_the_model_is_listed_wherever_it_stands() -> None:
    assert said("model: {name: gpt2, num_extra_layers: 3}\n") == ("not read, so in no figure: num_extra_layers",)
    (frozen,) = said("model: {name: gpt2, freeze_base_model: true}\n")
    assert frozen.startswith("freeze_base_model: true is set; which layers it trains is not read")


def test_what_is_read_neutral_or_about_other_things_is_not_listed() -> None:
    assert said(FACTORY + "plot_loss: true\npissa_init: true\noverwrite_cache: true\nbf16: true\nlogging_steps: 5\n") == ()
    assert said("model_name: gpt2\nmax_length: 128\nwandb_project: x\nearly_stopping_patience: 3\nmy_output_path: y\n") == ()
    assert said("model_name: gpt2\n_target_: x.Y\n") == ()
    assert said("model_name: gpt2\ninference: {batch_size: 64, max_new_tokens_length: 9}\ntruncation_side: 0\n") == ()
    assert said("model: {name: gpt2, odd_thing: 3}\ntrackers: {other_thing: 4}\n") == (), "sections that hold no arguments"
