"""`generation_settings`: what a completion is generated with, by llama-server's names."""

from __future__ import annotations

from typing import Any

from headway.base.specs.logits_rules import OFF
from headway.server.llama_server.request_schema import NativeFields, unaliased
from headway.server.llama_server.samplers import ORDER
from headway.server.openai.completions import CompletionJob

RULES = (
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta"),
)
ABSENT: dict[str, Any] = {  # what is not here, with the values that turn it off
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "grammar_lazy": False,
}


def settings_used(job: CompletionJob, body: NativeFields) -> dict[str, Any]:
    """The values that take effect: the request's, the model's, or what is drawn, such as the seed."""
    plan, sampler = job.plan, job.plan.sampler
    given = unaliased(body, "n_predict", "n_probs")
    limit = -1 if given["n_predict"] is None else given["n_predict"]
    listed = body.lora or ()
    return {
        "n_ctx": plan.engine.config.max_positions,
        "seed": sampler.seed,
        "temperature": sampler.temperature,
        "top_k": sampler.top_k,
        "top_p": sampler.top_p,
        "min_p": sampler.min_p,
        "typical_p": sampler.typical_p,
        "repeat_last_n": body.repeat_last_n,
        "repeat_penalty": sampler.repetition_penalty,
        "presence_penalty": sampler.presence_penalty,
        "frequency_penalty": sampler.frequency_penalty,
        **{name: plan.rules.get(name, getattr(OFF, name)) for name in RULES},
        "dry_sequence_breakers": list(plan.rules.get("dry_sequence_breakers", OFF.dry_sequence_breakers)),
        **ABSENT,
        "stop": [one for one in plan.stop if isinstance(one, str)],
        "max_tokens": limit,
        "n_predict": limit,
        "n_indent": body.n_indent or 0,
        "t_max_predict_ms": body.t_max_predict_ms or 0,
        "ignore_eos": plan.ignore_eos,
        "stream": bool(body.stream),
        "logit_bias": [{"bias": value, "token": id} for id, value in sampler.bias],
        "n_probs": given["n_probs"] or 0,
        "post_sampling_probs": bool(body.post_sampling_probs),
        "timings_per_token": bool(body.timings_per_token),
        "grammar": body.grammar or "",
        "samplers": list(ORDER) if body.samplers is None else body.samplers,
        "lora": [{"id": one.id, "scale": one.scale} for one in listed],
    }
