"""OpenVINO GenAI as a worker: its own pipeline over a model that optimum-intel exported, with its own defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import wire

GROUPS = (128, 64, 32)  # weights that share a scale in 4 bits: the largest that divides every width


class Worker:
    """One pipeline. The model needs no tokenizer: token ids go in and come out."""

    def load(self, path: str, form: str, *, threads: int, slots: int, sequences: int, total: int) -> dict[str, Any]:
        import openvino_genai as genai

        self.pipeline: Any = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
        return {
            "version": genai.__version__,
            "path": f"exported {form}",
            "weight_bytes": (Path(path) / "openvino_model.bin").stat().st_size,
        }

    def decode(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        import openvino as ov
        import openvino_genai as genai

        options = genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos, options.do_sample = tokens, True, False
        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        began = wire.now()
        found = self.pipeline.generate(inputs, options)
        ended = wire.now()
        # Its own clock has the moments of tokens, in milliseconds; the way in and out is told by ours.
        came = found.perf_metrics.raw_metrics.m_new_token_times
        if [len(text) for text in found.tokens] != [tokens] * len(prompts) or len(came) != tokens:
            raise RuntimeError(f"{[len(text) for text in found.tokens]} tokens came where {tokens} were asked for")
        decoding = (came[-1] - came[0]) / 1e3
        return wire.timing(began, ended - decoding, ended, len(prompts) * (tokens - 1), list(found.tokens[0]))

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        return {"seconds": self.decode([prompt], 1)["prompt_seconds"]}


def export(folder: str, target: str, form: str) -> dict[str, Any]:
    """Write a Hugging Face folder as OpenVINO's own, in int4, int8 or fp16."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    config = json.loads((Path(folder) / "config.json").read_text())
    widths = (config["hidden_size"], config["intermediate_size"])
    group = next(g for g in GROUPS if not any(width % g for width in widths))
    kinds: dict[str, Any] = {
        # The embedding in 4 bits too, as in the other engines' files.
        "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=group, all_layers=True),
        "int8": OVWeightQuantizationConfig(bits=8, sym=True),
        "fp16": None,
    }
    options = {"load_in_8bit": False} if kinds[form] is None else {"quantization_config": kinds[form]}
    OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, **options).save_pretrained(target)
    return {"path": target}


if __name__ == "__main__":
    wire.main(Worker, {"export": export})
