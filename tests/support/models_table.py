"""The table of docs/models.md, from the families and the cases that tests run: `python -m support.models_table`."""

from __future__ import annotations

import re
from pathlib import Path

from headway.models.config import from_hf
from headway.models.families import FAMILIES
from headway.models.families.family import Family
from support.gguf_families import ARCHS
from support.hf import VARIANTS, variant
from support.hf_families import CASES, family_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
HEADER = "| family | architecture in config.json | in GGUF | not as Llama | configs tested |\n"


def table() -> str:
    """One row a family: what it is, how it differs, and how many random configs are compared with transformers."""
    rows = [_row(family) for family in FAMILIES]
    return HEADER + "| --- | --- | --- | --- | --- |\n" + "".join(rows)


def _row(family: Family) -> str:
    configs = [config for config in _configs() if config["architectures"][0] in family.architectures]
    found = [from_hf(config) for config in configs]
    assert found, f"no test has a config of {family.name}"
    words = dict.fromkeys(word for config in found for word in config.description.differences())
    tested = {config["model_type"] for config in configs} & ARCHS.keys() or not family.describe
    gguf = f"`{family.gguf}`" if family.gguf and tested else "`llama`" if family.name == "mistral" else "no"
    names = ", ".join(f"`{name}`" for name in family.architectures)
    differs = ", ".join(words) or ("q, k and v in one matrix" if family.parts else "")
    return f"| {family.name} | {names} | {gguf} | {differs} | {len(configs)} |\n"


_found: list[dict] = []


def _configs() -> list[dict]:
    if not _found:
        plain = [variant(case["name"])[0] for group in VARIANTS.values() for case in group]
        others = [family_model(name)[0] for group in CASES.values() for name in group]
        _found.extend(plain + others)
    return _found


def written() -> str:
    """The table that the page has."""
    return PAGE.read_text().split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table() + END, text, flags=re.DOTALL))
