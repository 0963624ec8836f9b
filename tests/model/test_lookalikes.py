"""Names of real fine-tunes: the model they were made from is proposed where the name says family, version and size, and nothing else is."""

from __future__ import annotations

import pytest

from hfopt.model.known_models import find, likeliest, same_numbers

MADE_FROM = {
    "argilla/notus-mistral-7b": "mistralai/Mistral-7B-v0.1",
    "Open-Orca/oo-phi-2": "microsoft/phi-2",
    "argilla/CapybaraHermes-2.5-Mistral-7B": "mistralai/Mistral-7B-v0.1",
    "cognitivecomputations/dolphin-2.6-mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "NousResearch/Nous-Hermes-2-Yi-34B": "01-ai/Yi-34B",
    "NousResearch/Hermes-2-Pro-Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "NousResearch/Nous-Hermes-Llama2-13b": "meta-llama/Llama-2-13b-hf",
    "TheBloke/Llama-2-13B-chat-GPTQ": "meta-llama/Llama-2-13b-chat-hf",
    "TheBloke/CodeLlama-34B-Instruct-GPTQ": "codellama/CodeLlama-34b-Instruct-hf",
    "unsloth/mistral-7b-instruct-v0.2-bnb-4bit": "mistralai/Mistral-7B-Instruct-v0.2",
    "unsloth/llama-3-8b-bnb-4bit": "meta-llama/Meta-Llama-3-8B",
    "unsloth/gemma-2-9b-it-bnb-4bit": "google/gemma-2-9b-it",
    "unsloth/Qwen2.5-Coder-7B-Instruct-bnb-4bit": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "shenzhi-wang/Llama3-8B-Chinese-Chat": "meta-llama/Meta-Llama-3-8B",
    "acme/Daredevil-8B-Llama-3.1": "meta-llama/Llama-3.1-8B",
    "HuggingFaceH4/zephyr-7b-gemma-v0.1": "google/gemma-7b",
    "FlagAlpha/Llama2-Chinese-7b-Chat": "meta-llama/Llama-2-7b-chat-hf",
    "deepset/roberta-base-squad2": "FacebookAI/roberta-base",
    "deepset/roberta-large-squad2": "FacebookAI/roberta-large",
    "textattack/bert-base-uncased-SST-2": "google-bert/bert-base-uncased",
    "bhadresh-savani/distilbert-base-uncased-emotion": "distilbert/distilbert-base-uncased",
    "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli": "microsoft/deberta-v3-base",
    "Davlan/xlm-roberta-base-ner-hrl": "FacebookAI/xlm-roberta-base",
    "primeline/whisper-large-v3-turbo-german": "openai/whisper-large-v3-turbo",
    "vasista22/whisper-hindi-small": "openai/whisper-small",
    "jonatasgrosman/wav2vec2-large-xlsr-53-english": "facebook/wav2vec2-large-xlsr-53",
    "philschmid/flan-t5-base-samsum": "google/flan-t5-base",
    "philschmid/bart-large-cnn-samsum": "facebook/bart-large-cnn",
    "lvwerra/distilgpt2-imdb": "distilbert/distilgpt2",
    "lvwerra/gpt2-imdb": "openai-community/gpt2",
    "prithivMLmods/Qwen2-VL-7B-Latex-OCR": "Qwen/Qwen2-VL-7B",
    "lomahony/pythia-1.4b-helpful-sft": "EleutherAI/pythia-1.4b",
    "ArliAI/Mistral-Small-24B-ArliAI-RPMax-v1.4": "mistralai/Mistral-Small-24B-Base-2501",
    "nbeerbower/mistral-nemo-gutenberg-12B": "mistralai/Mistral-Nemo-Instruct-2407",
    "Vikhrmodels/Vikhr-Llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "huihui-ai/Qwen3-30B-A3B-abliterated": "Qwen/Qwen3-30B-A3B",
    "philschmid/llama-3-1-8b-math-orca-spectrum-10k-ep1": "meta-llama/Llama-3.1-8B",
    "acme/Falcon-H1-7B-Instruct-sft": "tiiuae/Falcon-H1-7B-Instruct",
    "Codestral-22B": "mistralai/Codestral-22B-v0.1",
    "./output/sft-qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "/data/models/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    "/mnt/runs/llama-3_1-8b-dpo/checkpoint-500": "meta-llama/Llama-3.1-8B",
}
WITHOUT = [
    "open-thoughts/OpenThinker-7B",
    "Vikhrmodels/Vikhr-Nemo-12B-Instruct-R-21-09-24",
    "m-a-p/OpenCodeInterpreter-DS-6.7B",
    "Intel/neural-chat-7b-v3-1",
    "openlm-research/open_llama_7b",  # of LLaMA's first version
    "huggyllama/llama-7b",
    "princeton-nlp/Sheared-LLaMA-1.3B",
    "WizardLM/WizardCoder-15B-V1.0",
    "Gryphe/MythoMax-L2-13b",
    "defog/sqlcoder-7b-2",
    "open-r1/OpenR1-Distill-7B",
    "simplescaling/s1.1-32B",
    "agentica-org/DeepScaleR-1.5B-Preview",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1",  # no Llama of that size
    "microsoft/deberta-base-mnli",  # the first DeBERTa is not bundled
    "Qwen/Qwen-7B-Chat",  # nor the first Qwen
    "mistralai/Mistral-Medium-128B",
    "liuhaotian/llava-mistral-34b",
    "Llama-3.1-9B-merge",
    "CohereForAI/c4ai-command-r-plus",  # three times the size
    "google/paligemma2-3b-pt-896",  # other images
    "tiiuae/Falcon-H1-3B-Base",
    "my-model",
    "outputs/run1",
    "bert",
    "",
]


@pytest.mark.parametrize(("name", "base"), MADE_FROM.items())
def test_a_fine_tunes_name_proposes_what_it_was_made_from(name: str, base: str) -> None:
    found = likeliest(name)
    assert found is not None and found.hub_id == base and find(base) is not None


@pytest.mark.parametrize("name", WITHOUT)
def test_a_name_that_says_too_little_or_something_else_proposes_nothing(name: str) -> None:
    assert likeliest(name) is None


def test_the_proposal_is_a_sentence_with_its_option() -> None:
    found = likeliest("acme/Hermes-9-Mistral-7B")
    assert found is not None
    assert found.sentence == "acme/Hermes-9-Mistral-7B looks like mistralai/Mistral-7B-v0.1: --like mistralai/Mistral-7B-v0.1"


def test_a_slip_keeps_its_numbers() -> None:
    assert same_numbers("bert-base-uncassed", "google-bert/bert-base-uncased")
    assert not same_numbers("mistralai/Codestral-22B", "mistralai/Mistral-7B-v0.1")
    assert not same_numbers("Llama-3.1-8B", "Llama-3.2-8B")
    assert not same_numbers("nvidia/mit-b2", "nvidia/mit-b0") and not same_numbers("facebook/detr-resnet-50", "microsoft/resnet-50")


@pytest.mark.parametrize("name", ["facebook/detr-resnet-50", "openmmlab/upernet-convnext-small", "facebook/maskformer-swin-base-coco"])
def test_a_model_around_a_backbone_is_not_the_backbone(name: str) -> None:
    assert likeliest(name) is None
    resnet = likeliest("me/resnet-50-flowers")
    assert resnet is not None and resnet.hub_id == "microsoft/resnet-50"
