"""Which experts of a file stay quantized on a device, in which form, and how many bytes they take.

A folder's experts in MXFP4 stay so, and a GGUF file's in every kind but NVFP4 and floats; but MXFP4 becomes
floats where they are float16, which cannot hold every scale. `kept_experts` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway.kernels.host.expert_form import FP4, ExpertForm
from headway.models.families.family import Cut, Each, FirstOf
from headway.models.files.mxfp4_folder import KIND
from headway.models.files.weights import GgufWeights
from headway.models.weights.roles import Roles
from headway.models.weights.shapes import has_experts, layer_shapes

EXPERTS = (("expert_gate", "expert_up"), ("expert_down",))  # roles whose matrices are one operand
FORMS: Mapping[str, ExpertForm] = MappingProxyType(
    {
        KIND: FP4,
        **dict.fromkeys(("Q4_0", "TQ1_0", "TQ2_0"), ExpertForm("int4")),
        "Q4_1": ExpertForm("int4", minimum=True),
        **dict.fromkeys(("Q5_0", "Q8_0", "IQ4_NL"), ExpertForm("int8")),
        "Q5_1": ExpertForm("int8", minimum=True),
        "Q2_K": ExpertForm("int4", 16, steps=True, minimum=True),
        "Q3_K": ExpertForm("int4", 16, steps=True),
        "Q4_K": ExpertForm("int4", steps=True, minimum=True),
        "Q5_K": ExpertForm("int8", steps=True, minimum=True),
        "Q6_K": ExpertForm("int8", 16, steps=True),
        **dict.fromkeys(("IQ4_XS", "IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S"), ExpertForm("int8", steps=True)),
        **dict.fromkeys(("IQ1_M", "IQ2_XS", "IQ2_S"), ExpertForm("int8", 16, steps=True)),
    }
)


def kept_kind(roles: Roles, some: tuple[str, ...], layer: int, dtype: str) -> str | None:
    """The format in which experts' matrices stay where floats are of this type; None if they become floats."""
    kinds = {stored_kind(roles, role, layer) for role in some}
    kind = kinds.pop() if len(kinds) == 1 else None
    return None if kind not in FORMS or (kind == KIND and dtype == "float16") else kind


def kept_weights(roles: Roles, dtype: str) -> dict[str, tuple[str, int]]:
    """All weights that stay quantized, by name: their formats, and the bytes that they take."""
    found: dict[str, tuple[str, int]] = {}
    for layer in range(roles.config.layers):
        if not has_experts(roles.config, layer):
            continue
        for some in EXPERTS:
            if (kind := kept_kind(roles, some, layer, dtype)) is None:
                continue
            for role in some:  # which may be cut from one weight
                (count, n, k), name = layer_shapes(roles.config, layer)[role], weight_name(roles, role, layer)
                halves = 2 * -(-n // 16) if len(some) == 1 else -(-n // 8)  # of strips
                size = count * halves * FORMS[kind].strip_bytes(k) // 2
                found[name] = kind, size + found.get(name, (kind, 0))[1]
    return found


def weight_name(roles: Roles, role: str, layer: int) -> str:
    part, at = roles.part(role), roles.layer(layer)
    assert not isinstance(part, Each)
    return roles.name(at, part) if isinstance(part, str | FirstOf) else at + part.name


def stored_kind(roles: Roles, role: str, layer: int) -> str | None:
    """The type of a weight that holds the matrices of all experts, whole."""
    part, weights = roles.part(role), roles.weights
    if isinstance(part, Cut) == isinstance(weights, GgufWeights) or isinstance(part, Each):
        return None
    return weights.stored(weight_name(roles, role, layer))
