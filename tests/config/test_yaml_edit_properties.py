"""Over generated YAML: what comes out parses to the old mapping plus the changes, and what is not touched is not touched."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import yaml
from hypothesis import HealthCheck, given, settings

from hfopt.config.read_job import load_bytes
from hfopt.config.training_arguments import same
from hfopt.config.yaml_edit import edit
from hfopt.errors import ConfigError
from hfopt.schema import Change

SETTINGS = settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
KEYS = [
    "gradient_accumulation_steps",
    "learning_rate",
    "bf16",
    "optim",
    "dataloader_num_workers",
    "save_steps",
    "lr_scheduler_kwargs",
    "run_name",
]
words = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=12)
scalars = st.one_of(
    st.integers(-(10**6), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    words,
    st.just("no"),
    st.just("5e-5"),
)
values = st.one_of(
    scalars, st.lists(scalars, max_size=3), st.dictionaries(st.sampled_from(["a", "b_c", "use_reentrant"]), scalars, max_size=3)
)
new_values = st.one_of(
    st.integers(1, 4096),
    st.booleans(),
    st.floats(1e-8, 10.0),
    words,
    st.dictionaries(st.sampled_from(["a", "every_n"]), scalars, min_size=1, max_size=2),
)


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """A YAML text in some style, and the path of its section. Comments, blank lines, quotes, flow or block, CRLF, no final newline."""
    arguments = {"per_device_train_batch_size": draw(st.integers(1, 64)), "num_train_epochs": 3}
    arguments |= draw(st.dictionaries(st.sampled_from(KEYS), values, max_size=5))
    nested = draw(st.booleans())
    data: dict[str, Any] = {"model_name_or_path": "x", "training": arguments} if nested else {"note": "x", **arguments}
    text = yaml.safe_dump(
        data,
        default_flow_style=draw(st.sampled_from([False, True, None])),
        indent=draw(st.sampled_from([2, 4, 8])),
        allow_unicode=draw(st.booleans()),
        sort_keys=draw(st.booleans()),
        width=draw(st.sampled_from([20, 80, 10_000])),
    )
    lines = text.splitlines(keepends=False)
    if draw(st.booleans()):
        lines = ["# a header", "", *lines]
    ending = draw(st.sampled_from(["\n", "\r\n"]))
    text = ending.join(lines) + draw(st.sampled_from(["", ending, ending * 3]))
    return draw(st.sampled_from(["", "\ufeff"])) + text, (("training",) if nested else ())


@given(documents())
@SETTINGS
def test_no_change_is_the_identity(document: tuple[str, tuple[str, ...]]) -> None:
    loaded = load_bytes(document[0].encode(), "c.yaml")
    assert edit(loaded, []).data == document[0].encode()


@given(documents(), st.dictionaries(st.sampled_from([*KEYS, "per_device_train_batch_size"]), new_values, min_size=1, max_size=4))
@SETTINGS
def test_the_result_is_the_old_mapping_plus_the_changes(document: tuple[str, tuple[str, ...]], changes: dict[str, Any]) -> None:
    text, path = document
    loaded = load_bytes(text.encode(), "c.yaml")
    wanted = copy.deepcopy(yaml.safe_load(text))
    section = wanted[path[0]] if path else wanted
    section.update(changes)
    edited = edit(loaded, [Change(key=key, before=None, after=value, reason="") for key, value in changes.items()])
    assert same(yaml.safe_load(edited.data.decode()), wanted)


@given(documents(), st.integers(1, 10**6))
@SETTINGS
def test_one_number_changes_one_line(document: tuple[str, tuple[str, ...]], value: int) -> None:
    text, _ = document
    edited = edit(load_bytes(text.encode(), "c.yaml"), [Change(key="per_device_train_batch_size", before=None, after=value, reason="")])
    before, after = text.split("\n"), edited.data.decode().split("\n")
    assert len(before) == len(after)
    assert sum(one != other for one, other in zip(before, after, strict=True)) <= 1


@given(documents(), st.sampled_from(KEYS))
@SETTINGS
def test_a_removed_key_is_gone_and_nothing_else(document: tuple[str, tuple[str, ...]], key: str) -> None:
    text, path = document
    wanted = yaml.safe_load(text)
    (wanted[path[0]] if path else wanted).pop(key, None)
    edited = edit(load_bytes(text.encode(), "c.yaml"), [Change(key=key, before=None, after=None, reason="")])
    assert same(yaml.safe_load(edited.data.decode()), wanted)
    rest = iter(text)
    assert all(character in rest for character in edited.data.decode()), "a removal only takes characters away"


FRAGMENTS = [
    "per_device_train_batch_size: 8  # 8 fits",
    "per_device_train_batch_size: &size 8",
    "per_device_train_batch_size: *n",
    "per_device_train_batch_size:",
    "per_device_train_batch_size: !!int '8'",
    "gradient_accumulation_steps: 4 #x",
    "gradient_accumulation_steps: 2",
    "'learning_rate': 5e-5",
    '"learning_rate" : 1.0e-5   ',
    "optim: >-\n    adamw\n    torch\n\n",
    "optim: 'adamw_torch'",
    "run_name: |+\n  two\n  lines\n\n",
    "run_name: a plain text\n  over two lines",
    "? save_steps\n: 10",
    "bf16: yes",
    "bf16: True # on",
    "gradient_checkpointing_kwargs:\n  use_reentrant: False  # why\n  # more",
    "gradient_checkpointing_kwargs: {use_reentrant: false}",
    "gradient_checkpointing_kwargs: *m",
    "report_to:\n- wandb\n# and\n- none",
    "report_to: [a,\n  b]",
    "save_steps: *n",
    "# a comment: per_device_train_batch_size: 8",
    "",
    "weight_decay: 0.",
    "<<: *m",
    'chat_template: "{% if x %}\\n{{ y }}: #{% endif %}"',
]
MORE = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-5,
    "bf16": False,
    "optim": "sgd",
    "save_steps": 7,
    "run_name": "it's: #1",
    "gradient_checkpointing_kwargs": {"use_reentrant": True, "every_n_layers": 2},
    "report_to": ["tensorboard"],
    "dataloader_num_workers": 4,
}


@given(
    st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=8),
    st.sampled_from(["", "  ", "training:", "- "]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.lists(st.sampled_from(sorted(MORE)), min_size=1, max_size=4, unique=True),
    st.booleans(),
)
@SETTINGS
def test_hand_written_yaml_is_edited_right_or_refused(
    fragments: list[str], shape: str, ending: str, final: bool, keys: list[str], remove: bool
) -> None:
    text, path = _assembled(fragments, shape, ending, final)
    try:
        loaded = load_bytes(text.encode(), "c.yaml")
    except ConfigError:
        return
    if loaded.job is None or loaded.job.section != path:
        return
    tied = "&size" in text or "*" in text
    wanted = yaml.safe_load(text)
    section = wanted
    for part in path:
        section = section[int(part) if part.isdecimal() else part]
    if remove:
        section.pop(keys[0], None)
    else:
        section.update({key: MORE[key] for key in keys})
    changes = [Change(key=key, before=None, after=None if remove else MORE[key], reason="") for key in (keys[:1] if remove else keys)]
    try:
        edited = edit(loaded, changes)
    except ConfigError:
        assert tied, "only anchors are a reason to refuse"
        return
    assert same(yaml.safe_load(edited.data.decode()), wanted)
    assert edited.data.count(b"#") >= (0 if remove or "report_to" in keys else text.count("#")), "comments stay"


def _assembled(fragments: list[str], shape: str, ending: str, final: bool) -> tuple[str, tuple[str, ...]]:
    lines = "\n".join(["num_train_epochs: 1", *fragments, "warmup_steps: 5"]).split("\n")
    head = ["shared: {n: &n 3, m: &m {seed: 1}}"]
    if shape == "training:":
        lines, path = [*head, "training:", *("   " + line for line in lines)], ("training",)
    elif shape == "- ":
        lines, path = [*head, "jobs:", "- " + lines[0], *("  " + line for line in lines[1:])], ("jobs", "0")
    else:
        lines, path = [shape + line for line in [*head, *lines]], ()
    return ending.join(lines) + (ending if final else ""), path
