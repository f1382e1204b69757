"""Weights that files keep together: one matrix of q, k and v, or of gate and up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.models.families.family import Cut, Part

if TYPE_CHECKING:
    from headway.models.config import ModelConfig


def stacked(name: str, roles: tuple[str, ...], *, transposed: bool = False) -> dict[str, Part]:
    """Roles whose rows follow each other in one matrix, and in its bias; `transposed` is stored as [K, N]."""
    parts: dict[str, Part] = {}
    for role in roles:
        parts[role], parts[f"{role}_bias"] = _stacked(name, roles, role, transposed)
    return parts


def _stacked(name: str, roles: tuple[str, ...], role: str, transposed: bool) -> tuple[Cut, Cut]:
    def rows(c: ModelConfig) -> int:
        return sum(_rows(r, c) for r in roles)

    def shape(c: ModelConfig) -> tuple[int, ...]:
        return (c.hidden_size, rows(c)) if transposed else (rows(c), c.hidden_size)

    def own(tensor: Any, c: ModelConfig) -> Any:
        first = sum(_rows(r, c) for r in roles[: roles.index(role)])
        return tensor[first : first + _rows(role, c)]

    def weight(tensor: Any, c: ModelConfig) -> Any:
        return own(tensor.T if transposed else tensor, c)

    return Cut(f"{name}.weight", shape, weight), Cut(f"{name}.bias", lambda c: (rows(c),), own)


def stacked_experts(name: str) -> dict[str, Part]:
    """Gates and then ups of experts, in one tensor [X, 2F, E]."""

    def shape(c: ModelConfig) -> tuple[int, int, int]:
        x = c.description.experts
        assert x is not None
        return x.count, 2 * x.size, c.hidden_size

    def gate(tensor: Any, c: ModelConfig) -> Any:
        return tensor[:, : shape(c)[1] // 2]

    def up(tensor: Any, c: ModelConfig) -> Any:
        return tensor[:, shape(c)[1] // 2 :]

    return {"expert_gate": Cut(name, shape, gate), "expert_up": Cut(name, shape, up)}


def expert_parameters(name: str) -> dict[str, Part]:
    """The matrices of experts where one module has all of them."""
    return {**stacked_experts(f"{name}.gate_up_proj"), "expert_down": f"{name}.down_proj"}


def grouped(name: str) -> dict[str, Part]:
    """q, k and v in one matrix, by key heads: the queries that share it, the key, the value."""
    parts: dict[str, Part] = {}
    for role, place in (("q", slice(0, -2)), ("k", slice(-2, -1)), ("v", slice(-1, None))):

        def take(tensor: Any, c: ModelConfig, place: slice = place) -> Any:
            rest = tensor.shape[1:]
            groups = tensor.reshape(c.kv_heads, c.heads // c.kv_heads + 2, c.head_dim, *rest)
            return groups[:, place].reshape(-1, *rest)

        def rows(c: ModelConfig) -> int:
            return (c.heads + 2 * c.kv_heads) * c.head_dim

        parts[role] = Cut(f"{name}.weight", lambda c: (rows(c), c.hidden_size), take)
        parts[f"{role}_bias"] = Cut(f"{name}.bias", lambda c: (rows(c),), take)
    return parts


def transposed(name: str, role: str) -> dict[str, Part]:
    """A matrix that is stored as [K, N]."""

    def shape(c: ModelConfig) -> tuple[int, ...]:
        sizes = {"o": (c.heads * c.head_dim, c.hidden_size), "up": (c.hidden_size, c.intermediate_size)}
        return sizes.get(role, (c.intermediate_size, c.hidden_size))

    return {role: Cut(f"{name}.weight", shape, lambda tensor, c: tensor.T), f"{role}_bias": f"{name}.bias"}


def _rows(role: str, c: ModelConfig) -> int:
    return {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}[role] * c.head_dim if role in "qkv" else c.intermediate_size
