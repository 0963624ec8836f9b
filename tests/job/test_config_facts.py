"""What planning reads of a model's configuration."""

from __future__ import annotations

from types import SimpleNamespace

from hfopt.schema import ConfigFacts


class Layered:
    """As transformers' heterogeneous configurations: a value that differs by layer is not given for the whole."""

    per_layer_attributes = frozenset({"head_dim"})
    per_layer_config = (SimpleNamespace(head_dim=256), SimpleNamespace(head_dim=512))
    num_hidden_layers = 2
    hidden_size = 64

    @property
    def head_dim(self) -> int:
        raise RuntimeError("ambiguous")


def test_of_layers_that_differ_the_largest_counts() -> None:
    facts = ConfigFacts.of(Layered())
    assert (facts.head_size, facts.layers, facts.width) == (512, 2, 64)
