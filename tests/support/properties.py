"""How many examples a property is tried with: a third of them in the default run, all of them in `make test-all`."""

from __future__ import annotations

from hypothesis import settings

PROFILES = {"default-run": 34, "all": 100}  # examples of a property that asks for 100
for name, count in PROFILES.items():
    settings.register_profile(name, max_examples=count, deadline=None)


def load_profile(name: str | None) -> None:
    """The profile that `--hypothesis-profile` names; without it the default run's."""
    settings.load_profile(name or "default-run")


def examples(count: int) -> int:
    """`count` examples, or fewer in this run."""
    return max(1, count * settings.default.max_examples // 100)
