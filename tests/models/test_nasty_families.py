"""Every key of every family's config with every nasty value: a config, or an error of ours that names what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

import headway as hw
from headway.models.config import ModelConfig, from_hf
from support.hf_families import EVERY, family_model

FIRST = [next(iter(group)) for group in EVERY.values()]
QUICK = ("gemma3", "deepseek-v2")
NASTY: list[Any] = [
    *(None, True, "12", "", [], {}, [3], ["a"], [["a"], {}], 0, -1, 1, 3, 2.5, -0.5),
    *(1 << 24, 1 << 63, 10**400, 1e308, -1e308, float("nan"), float("inf")),
]


def mutations(config: dict[str, Any], whole: dict[str, Any] | None = None) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The key, its value and a copy of the whole config with it, for each key however deep."""
    top = config if whole is None else whole
    for key, old in list(config.items()):
        for value in NASTY:
            config[key] = value
            yield key, value, copy.deepcopy(top)
        config[key] = old
        if isinstance(old, dict):
            yield from mutations(old, top)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FIRST])
def test_a_nasty_value_in_a_familys_config_gives_a_config_or_one_of_our_errors(name: str) -> None:
    raw, _ = family_model(name)
    read = 0
    for key, value, changed in mutations(raw):
        try:
            assert isinstance(from_hf(changed), ModelConfig)
            read += 1
        except hw.HeadwayError:
            continue
        except Exception as error:
            error.add_note(f"{name}: {key} = {value!r}")
            raise
    assert read  # the keys that a reader does not use
