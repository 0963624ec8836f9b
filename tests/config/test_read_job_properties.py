"""Whatever stands behind the keys, loading ends in a Loaded or a ConfigError, and says nothing secret."""

from __future__ import annotations

import json
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hfopt.config.read_job import load_bytes
from hfopt.config.training_arguments import ALIASES, GONE, known_elsewhere
from hfopt.config.yaml_edit import upgrade
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import installed
from hfopt.redact import scrub

SETTINGS = settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = sorted({*installed().fields, *GONE, *ALIASES, *known_elsewhere(), "training", "model", "peft", "data", "lora", "defaults"})
LIKELY = [
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "warmup_ratio",
    "num_generations",
    "lora_r",
    "eval_steps",
]
ODD = ["no", "None", "auto", "${a.b}", "${learning_rate}", "{{ x }}", "5e-5", "-1", "1e400", "0x10", "", "yes", "torch.bfloat16", "q,v"]
keys = st.one_of(st.sampled_from(LIKELY), st.sampled_from(NAMES), st.integers(), st.none())
odd = st.sampled_from(ODD)
scalars = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), odd, st.dates(), st.binary(max_size=3), st.text(max_size=5))
values = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)), max_leaves=12
)


@given(st.dictionaries(keys, values, min_size=1, max_size=8), st.integers(1, 64))
@SETTINGS
def test_any_values_are_read_or_refused(data: dict[Any, Any], world_size: int) -> None:
    source = yaml.safe_dump({"num_train_epochs": 1, **data}, allow_unicode=True).encode("utf-8", "surrogatepass")
    try:
        loaded = load_bytes(source, "c.yaml", world_size=world_size)
        upgraded = upgrade(loaded)
    except ConfigError as error:
        assert "c.yaml" in str(error)
        return
    assert loaded.source == source
    assert all(problem.message and problem.code for problem in loaded.problems)
    if loaded.job is not None:
        assert loaded.job.per_device_batch >= 1 and loaded.job.effective_batch % world_size == 0
        json.dumps(scrub(dict(loaded.job.raw)), allow_nan=False)
    assert load_bytes(upgraded.data, "c.yaml", world_size=world_size).source == upgraded.data
