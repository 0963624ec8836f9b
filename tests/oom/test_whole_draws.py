"""A piece's random numbers are its rows of what the whole draws, and the generator ends where the whole leaves it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hfopt.oom.whole_draws import Draws, Learned, Rows

Forward = Callable[[Tensor], Tensor]
SAMPLES = torch.arange(6 * 4 * 4, dtype=torch.float64).view(6, 4, 4) + 1


def run(forward: Forward, rows: slice, learned: Learned, place: Rows | None, *, learns: bool = False) -> Tensor:
    torch.manual_seed(3)
    with Draws(learned, place, learns=learns):
        return forward(SAMPLES[rows])


def learned_from(forward: Forward) -> Learned:
    learned = Learned()
    run(forward, slice(0, 2), learned, None)
    for row in range(2):
        run(forward, slice(row, row + 1), learned, Rows(start=row, count=1, of=2), learns=True)
    return learned


def twice(x: Tensor) -> Tensor:
    return functional.dropout(functional.dropout(x, 0.3) + 1, 0.5)


def flattened(x: Tensor) -> Tensor:
    return functional.dropout(x.flatten(0, 1), 0.3).view(x.shape)


def sequence_first(x: Tensor) -> Tensor:
    return functional.dropout(x.transpose(0, 1), 0.3).transpose(0, 1) + functional.dropout(x.transpose(0, 1).contiguous(), 0.3).transpose(
        0, 1
    )


def layer_drop(x: Tensor) -> Tensor:
    return x * torch.rand([]) + torch.rand(x.shape[-1]) + torch.randn_like(x)


def noise(x: Tensor) -> Tensor:
    return x + torch.zeros_like(x).uniform_(-1, 1) + torch.randint(0, 9, (x.shape[0], 2)).sum(1).view(-1, 1, 1)


def fused(x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.3, True)[0]


def attended(x: Tensor) -> Tensor:
    heads = x.unsqueeze(1)
    return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4).squeeze(1)


@pytest.mark.parametrize("forward", [twice, flattened, sequence_first, layer_drop, noise, fused, attended], ids=lambda f: f.__name__)
def test_rows_of_the_whole(forward: Forward) -> None:
    learned = learned_from(forward)
    assert learned.givable
    torch.manual_seed(3)
    whole, after = forward(SAMPLES), torch.get_rng_state()
    for start, stop in ((0, 4), (4, 6)):
        piece = run(forward, slice(start, stop), learned, Rows(start=start, count=stop - start, of=6))
        assert torch.equal(piece, whole[start:stop])
        assert torch.equal(torch.get_rng_state(), after)


def own_generator(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=torch.Generator())


def permuted(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))]


def square(x: Tensor) -> Tensor:
    return x + torch.rand(len(x), len(x)).sum()


@pytest.mark.parametrize("forward", [own_generator, permuted, square], ids=lambda f: f.__name__)
def test_what_cannot_be_given_is_known(forward: Forward) -> None:
    learned = learned_from(forward)
    assert not learned.givable
    assert learned.permutes == (forward is permuted)


def test_attention_that_drops_nothing_draws_nothing() -> None:
    learned = learned_from(lambda x: functional.scaled_dot_product_attention(x, x, x))
    assert not learned.pair
    assert learned.other is None
