"""What goes through the model is counted from shapes; a weight costs six FLOPs a token only if it multiplies and trains."""

from __future__ import annotations

import pytest
import torch
import transformers

from hfopt.monitor.fault_guard import Faults
from hfopt.monitor.model_inputs import InputWatch, flops_per_token


class Echo(torch.nn.Module):
    main_input_name = "input_ids"

    def forward(self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **more: object) -> None:
        return None


def watched() -> tuple[Echo, InputWatch]:
    model, watch = Echo(), InputWatch(Faults(print))
    watch.attach(model)
    return model, watch


def test_samples_tokens_and_padding() -> None:
    model, watch = watched()
    for length in (4, 8):
        mask = torch.ones(2, length, dtype=torch.long)
        mask[:, length // 2 :] = 0
        model(input_ids=torch.ones(2, length, dtype=torch.long), attention_mask=mask)
    assert watch.take() == (4, 24, 0.5, False)
    assert watch.take()[:3] == (0, None, None)


def test_evaluation_and_generation_do_not_count() -> None:
    model, watch = watched()
    ids = torch.ones(2, 4, dtype=torch.long)
    model.eval()
    model(input_ids=ids)
    model.train()
    with torch.no_grad():
        model(input_ids=ids)
    assert watch.take()[0] == 0


def test_images_are_samples_without_tokens() -> None:
    model, watch = watched()
    model.main_input_name = "pixel_values"
    watch.detach()
    watch.attach(model)
    model(pixel_values=torch.zeros(3, 3, 8, 8))
    assert watch.take() == (3, None, None, None)


def test_strange_inputs_are_no_fault() -> None:
    model, watch = watched()
    model(input_ids=None, attention_mask={"full": 1})
    model(input_ids=torch.ones(2, 4, dtype=torch.long), attention_mask=torch.ones(2, 1, 4, 4))
    assert watch.take() == (2, 8, None, None) and not watch.faults.off


def test_detached_hooks_are_gone() -> None:
    model, watch = watched()
    watch.detach()
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_flops_of_tied_and_untied_embeddings() -> None:
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, tie_word_embeddings=True))
    untied = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, tie_word_embeddings=False))
    every = sum(parameter.numel() for parameter in tied.parameters())
    assert flops_per_token(tied) == 6 * every
    assert flops_per_token(untied) == 6 * every  # one table more, which is only looked up


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    full = flops_per_token(model)
    model.requires_grad_(False)
    assert full is not None and flops_per_token(model) == full * 4 / 6


class Own(torch.nn.Module):
    """A user's own module: inputs of any name, nothing that transformers knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 10, bias=False), torch.nn.Linear(10, 2, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[0] == 13:
            raise ValueError("an unlucky batch")
        result: torch.Tensor = self.second(self.first(x))
        return result


def test_what_is_not_text_is_counted_in_the_first_forward_and_never_again() -> None:
    model, watch = Own(), InputWatch(Faults(print), counts_flops=True)
    watch.attach(model)
    for rows in (4, 8):
        model(labels=torch.zeros(rows), x=torch.zeros(rows, 6))
        assert watch.flops_per_sample == 3 * 2 * (6 * 10 + 10 * 2)
    assert watch.take()[:2] == (12, None)
    assert not model._forward_hooks and len(model._forward_pre_hooks) == 1  # what is done is not paid for in every step
    model.first.weight.requires_grad_(False)
    half, frozen = InputWatch(Faults(print), counts_flops=True), 60 / 80
    watch.detach()
    half.attach(model)
    model(x=torch.zeros(4, 6))
    assert half.flops_per_sample == (3 - frozen) * 2 * 80


def test_a_forward_that_raises_leaves_no_counter_behind() -> None:
    model, watch = Own(), InputWatch(Faults(print), counts_flops=True)
    watch.attach(model)
    with pytest.raises(ValueError, match="unlucky"):
        model(x=torch.zeros(13, 6))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert watch.flops_per_sample is None and not watch.faults.off
