"""llama.cpp's LoRA files: GGUF with general.type=adapter, and for each weight its name with .lora_a and .lora_b."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from headway.base.errors import BadModelFile, Unsupported
from headway.base.specs.adapters import OUTSIDE
from headway.base.text import short_repr
from headway.kernels.native.library import STREAM_ROLES
from headway.models.adapters.low_rank import HEAD, Limits, LowRank, Target, check_layer
from headway.models.adapters.modules import OUTER, outer_names
from headway.models.files.gguf import GgufFile
from headway.models.files.weights import GgufWeights

NAMES = {
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
EXPERTS = "_exps"  # how names of matrices of all experts end
STACKED = outer_names(*STREAM_ROLES, gguf=True)  # those of all streams
OWN = "|".join(sorted(outer_names(*OUTER, gguf=True)))
NAME = re.compile(rf"(?:blk\.(?P<layer>\d+)\.(?P<part>\w{{1,64}})|(?P<own>{OWN})|output)\.weight\.lora_(?P<side>[ab])")


def read_file(path: Path, limits: Limits) -> tuple[dict[Target, LowRank], str]:
    """The pairs in a file, and the architecture that it says it is for."""
    with GgufWeights(GgufFile.open(path)) as weights:
        facts = weights.file.metadata
        if facts.get("general.type") != "adapter":
            raise BadModelFile(
                f"{path} has general.type {short_repr(facts.get('general.type'))}; an adapter file says 'adapter'"
            )
        if facts.get("adapter.type") != "lora":
            raise Unsupported(
                f"{path} has adapter.type {short_repr(facts.get('adapter.type'))}; only 'lora' is supported"
            )
        if "adapter.alora.invocation_tokens" in facts:
            raise Unsupported(f"{path} is activated by tokens (aLoRA), which is not supported")
        architecture, alpha = facts.get("general.architecture"), facts.get("adapter.lora.alpha")
        if not isinstance(architecture, str):
            raise BadModelFile(f"{path} does not say its general.architecture")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise BadModelFile(f"{path} has adapter.lora.alpha {short_repr(alpha)}; it must be a finite number")
        limits.check_bytes(f"{path}", sum(weights.nbytes(name) for name in weights.names()))
        sides = _sides(path, weights)
    pairs = {}
    for target, side in sides.items():
        what = f"{path}: {target}"
        if side.keys() != {"a", "b"}:
            raise BadModelFile(f"{what} has only lora_{next(iter(side))}; lora_a and lora_b are needed")
        if side["b"].ndim == 1:  # of one output, which such files do not tell from a vector
            side["b"] = side["b"][None]
        stacked = target.part.endswith(EXPERTS) or target.part in STACKED
        limits.check(what, side["a"], side["b"], experts=stacked)
        scaling = alpha / side["a"].shape[-2] if alpha else 1.0  # as llama.cpp does
        pairs[target] = LowRank(side["a"], side["b"], limits.check_scaling(what, scaling))
    if not pairs:
        raise BadModelFile(f"{path} has no LoRA weights")
    return pairs, architecture


def _sides(path: Path, weights: GgufWeights) -> dict[Target, dict[str, np.ndarray]]:
    sides: dict[Target, dict[str, np.ndarray]] = {}
    for name in weights.names():
        match = NAME.fullmatch(name)
        if match is None:
            raise Unsupported(
                f"{path}: the tensor {short_repr(name)} is not LoRA of one of a decoder's linear layers (such as "
                f"blk.0.attn_q) or of its output matrix (output); others are not supported"
            )
        target = HEAD
        if match["part"] is not None:
            target = Target(check_layer(match["layer"], f"{path}: {name}"), NAMES.get(match["part"], match["part"]))
        elif match["own"] is not None:
            target = Target(OUTSIDE, match["own"])
        tensor = weights.array(name).copy()  # not the file's map
        sides.setdefault(target, {})[match["side"]] = tensor
    return sides
