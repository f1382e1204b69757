"""The table of docs/models.md, from the families and from the tests that ran.

In tests/, `python -m pytest models -m "slow or not slow" --junitxml=results.xml` and then
`python -m support.models_table results.xml` write it; there may be several such files. A config counts where every test
of it has passed.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from headway.models.capabilities import Capabilities
from headway.models.config import from_hf
from headway.models.families import FAMILIES
from headway.models.families.family import Family
from support.hf import VARIANTS, variant
from support.hf_families import EVERY, family_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
FACTS = ("family", "architecture in config.json", "in GGUF", "not as Llama", "CPU", "CUDA")
PATHS = ("native", "torch", "GGUF", "llama.cpp")
HEADER = (*FACTS, *(f"configs: {path}" for path in PATHS))
# The files whose tests compare a config, and those of their tests that do if not all.
BY_CASE = ("test_families", "test_described_families", "test_attention_families", "test_recurrent_families")
BY_FILE = {
    "test_load": ("GGUF", "test_a_gguf_file_is_the_model_it_was_written_from"),
    "test_described_gguf": ("GGUF", "test_a_gguf_file_is_the_model_it_was_written_from"),
    "test_recurrent_gguf": ("GGUF", "test_a_gguf_file_is_the_model_it_was_written_from"),
    "test_deepseek_gguf": ("GGUF", "test_a_gguf_file_is_the_model_it_was_written_from"),
    "test_llama_cpp": ("llama.cpp", r"test_(plain|other)_families|test_families_with_\w+"),
}
Counts = dict[str, dict[str, int]]  # family → path → configs


def table(counts: Counts) -> str:
    """One row a family: what it is, how it differs, and how many random configs of it have passed."""
    rows = [HEADER, ("---",) * len(HEADER)]
    rows += [(*facts(family), *(str(counts[family.name].get(path, 0)) for path in PATHS)) for family in FAMILIES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def facts(family: Family) -> tuple[str, ...]:
    """What the registry and the tests' configs say of a family."""
    found = [from_hf(config) for config in _configs() if config["architectures"][0] in family.architectures]
    assert found, f"no test has a config of {family.name}"
    words = dict.fromkeys(word for config in found for word in config.differences())
    gguf = "llama" if family.name == "mistral" else family.gguf
    names = ", ".join(f"`{name}`" for name in family.architectures)
    stacked = f"{'q, k and v' if 'q' in family.parts else 'gate and up'} in one matrix"
    differs = ", ".join(words) or (stacked if family.parts else "")
    cuda = "Triton" if all(Capabilities.of(config).triton for config in found) else "torch"
    cpu = "native" if all(Capabilities.of(config).native for config in found) else "torch"
    return family.name, names, f"`{gguf}`" if gguf else "no", differs, cpu, cuda


def known() -> Counts:
    """How many configs the tests have, by family and path."""
    counts: Counts = defaultdict(dict)
    for names in [*([case["name"] for case in group] for group in VARIANTS.values()), *map(list, EVERY.values())]:
        family = family_of(names[0])
        counts[family]["torch"] = counts[family].get("torch", 0) + len(names)
        counts[family]["native"] = counts[family]["torch"]
    return counts


def family_of(name: str) -> str:
    """The family of a config, by its name in the tests, which a number may precede."""
    name = re.sub(r"^\d+-", "", name)
    for family, group in VARIANTS.items():
        if name == family or any(case["name"] == name for case in group):
            return family
    return max((f.name for f in FAMILIES if f"{name}-".startswith(f"{f.name}-")), key=len)


def passed(*results: Path) -> Counts:
    """How many configs of each family have passed on each path, from pytest's JUnit files."""
    verdicts: dict[tuple[str, str], list[bool]] = defaultdict(list)  # path and config → whether each test passed
    for test in (test for file in results for test in ElementTree.parse(file).iter("testcase")):
        for path, name in _what(test):
            verdicts[path, name].append(_passed(test))
    counts: Counts = defaultdict(dict)
    for (path, name), all_of in verdicts.items():
        family = family_of(name)
        counts[family][path] = counts[family].get(path, 0) + all(all_of)
    return counts


def _passed(test: ElementTree.Element) -> bool:
    return not any(part.tag in ("failure", "error", "skipped") for part in test)


def _what(test: ElementTree.Element) -> list[tuple[str, str]]:
    """The path and the config that a test compares; none if it is another kind of test."""
    file = str(test.get("classname")).rpartition(".")[2]
    found = re.fullmatch(r"(\w+)\[(.+)\]", str(test.get("name")))
    if found is None:
        return []
    function, id = found.groups()
    if file in BY_CASE:
        name, _, path = id.partition(", ")
        return [(path or "native", name)] if name in _names() else []
    path, wanted = BY_FILE.get(file, ("", "nothing"))
    return [(path, re.sub(r"-(require|off)$", "", id))] if re.fullmatch(wanted, function) else []


def _names() -> set[str]:
    return {case["name"] for group in VARIANTS.values() for case in group} | {n for g in EVERY.values() for n in g}


_found: list[dict] = []


def _configs() -> list[dict]:
    if not _found:
        plain = [variant(case["name"])[0] for group in VARIANTS.values() for case in group]
        _found.extend(plain + [family_model(name)[0] for group in EVERY.values() for name in group])
    return _found


def written() -> list[tuple[str, ...]]:
    """The rows of the table that the page has, with its header."""
    lines = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    return [rows[0], *rows[2:]]


if __name__ == "__main__":
    text, new = PAGE.read_text(), table(passed(*map(Path, sys.argv[1:])))
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + new + END, text, flags=re.DOTALL))
