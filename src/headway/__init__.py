"""Headway: a programmable inference engine for transformer models. The forward pass is the API.

    import headway as hw

    async def program(engine):
        async with engine.context() as ctx:
            ctx.user("Name three uses of a brick.")
            return await ctx.generate(hw.Argmax(), max_tokens=64).text()

    print(hw.Engine("smollm2").run(program))

torch is loaded when the first engine is made, not by this import.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

from headway.base.errors import (
    BadModelFile,
    Closed,
    ContextBusy,
    ContextLengthExceeded,
    DeadlineExceeded,
    HeadwayError,
    InvalidInput,
    InvalidMask,
    InvalidToken,
    ItemFailed,
    ModelError,
    ModelNotFound,
    OutOfMemory,
    OutOfPages,
    OutOfRange,
    PassFailed,
    SnapshotError,
    TemplateError,
    TokenBudgetExceeded,
    ToolFailed,
    Unsupported,
    UnsupportedModel,
    ValidationFailed,
    WrongType,
)
from headway.base.gc_paused import gc_paused
from headway.base.version import VERSION

if TYPE_CHECKING:
    from headway.base.brle import Brle as Brle
    from headway.base.masks import Mask as Mask
    from headway.base.probes import AttentionScores as AttentionScores
    from headway.base.probes import Distribution as Distribution
    from headway.base.probes import Entropy as Entropy
    from headway.base.probes import Hidden as Hidden
    from headway.base.probes import LogitLens as LogitLens
    from headway.base.probes import Logits as Logits
    from headway.base.probes import Logprob as Logprob
    from headway.base.probes import Logprobs as Logprobs
    from headway.base.probes import Probe as Probe
    from headway.base.probes import Rank as Rank
    from headway.base.probes import Ranked as Ranked
    from headway.base.probes import Ranking as Ranking
    from headway.base.samplers import Argmax as Argmax
    from headway.base.samplers import MinP as MinP
    from headway.base.samplers import Multinomial as Multinomial
    from headway.base.samplers import Sampler as Sampler
    from headway.base.samplers import Sampling as Sampling
    from headway.base.samplers import TopK as TopK
    from headway.base.samplers import TopKTopP as TopKTopP
    from headway.base.samplers import TopP as TopP
    from headway.base.samplers import Typical as Typical
    from headway.pipelines.make import pipeline as pipeline
    from headway.pipelines.outputs import ModelOutput as ModelOutput
    from headway.pipelines.pipeline import Pipeline as Pipeline
    from headway.pipelines.registry import register_task as register_task
    from headway.pipelines.task import Batch as Batch
    from headway.pipelines.task import PreparedItem as PreparedItem
    from headway.pipelines.task import Row as Row
    from headway.pipelines.task import Task as Task
    from headway.pipelines.task import TaskOptions as TaskOptions
    from headway.program.chat.reply import ChatLimits as ChatLimits
    from headway.program.chat.reply import ChatReply as ChatReply
    from headway.program.chat.reply import ToolResult as ToolResult
    from headway.program.constraints.constraint import Constraint as Constraint
    from headway.program.constraints.grammar import Grammar as Grammar
    from headway.program.context import Context as Context
    from headway.program.engine import Engine as Engine
    from headway.program.forward import Execution as Execution
    from headway.program.forward import Forward as Forward
    from headway.program.generation.beams import Continuation as Continuation
    from headway.program.generation.defaults import GenerationDefaults as GenerationDefaults
    from headway.program.generation.generator import Generation as Generation
    from headway.program.generation.sequences import Generations as Generations
    from headway.program.generation.steps import Prepared as Prepared
    from headway.program.generation.steps import Step as Step
    from headway.program.output import Output as Output
    from headway.program.output import ProbeHandle as ProbeHandle
    from headway.program.output import SampleHandle as SampleHandle
    from headway.program.sync import DecodeState as DecodeState
    from headway.program.sync import InferenceEngine as InferenceEngine
    from headway.program.sync import SamplingParams as SamplingParams
    from headway.program.sync import generate as generate
    from headway.text.replies.parts import BadToolCall as BadToolCall
    from headway.text.replies.parts import Content as Content
    from headway.text.replies.parts import Part as Part
    from headway.text.replies.parts import Reasoning as Reasoning
    from headway.text.replies.parts import Reply as Reply
    from headway.text.replies.parts import ToolCall as ToolCall
    from headway.text.replies.parts import ToolCallArguments as ToolCallArguments
    from headway.text.replies.parts import ToolCallEnd as ToolCallEnd
    from headway.text.replies.parts import ToolCallStart as ToolCallStart

__version__ = VERSION

# Where each public name lives; a module is imported when one of its names is first used.
_HOMES = {
    "base.brle": ("Brle",),
    "base.masks": ("Mask",),
    "base.probes": (
        "AttentionScores",
        "Distribution",
        "Entropy",
        "Hidden",
        "LogitLens",
        "Logits",
        "Logprob",
        "Logprobs",
        "Probe",
        "Rank",
        "Ranked",
        "Ranking",
    ),
    "base.samplers": (
        "Argmax",
        "MinP",
        "Multinomial",
        "Sampler",
        "Sampling",
        "TopK",
        "TopKTopP",
        "TopP",
        "Typical",
    ),
    "pipelines.make": ("pipeline",),
    "pipelines.outputs": ("ModelOutput",),
    "pipelines.pipeline": ("Pipeline",),
    "pipelines.registry": ("register_task",),
    "pipelines.task": ("Batch", "PreparedItem", "Row", "Task", "TaskOptions"),
    "program.generation.beams": ("Continuation",),
    "program.constraints.constraint": ("Constraint",),
    "program.context": ("Context",),
    "program.generation.defaults": ("GenerationDefaults",),
    "program.chat.reply": ("ChatLimits", "ChatReply", "ToolResult"),
    "program.engine": ("Engine",),
    "program.forward": ("Execution", "Forward"),
    "program.generation.generator": ("Generation",),
    "program.constraints.grammar": ("Grammar",),
    "program.output": ("Output", "ProbeHandle", "SampleHandle"),
    "program.generation.sequences": ("Generations",),
    "program.generation.steps": ("Prepared", "Step"),
    "program.sync": ("DecodeState", "InferenceEngine", "SamplingParams", "generate"),
    "text.replies.parts": (
        "BadToolCall",
        "Content",
        "Part",
        "Reasoning",
        "Reply",
        "ToolCall",
        "ToolCallArguments",
        "ToolCallEnd",
        "ToolCallStart",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Argmax",
    "AttentionScores",
    "BadModelFile",
    "BadToolCall",
    "Batch",
    "Brle",
    "ChatLimits",
    "ChatReply",
    "Closed",
    "Constraint",
    "Content",
    "Context",
    "ContextBusy",
    "ContextLengthExceeded",
    "Continuation",
    "DeadlineExceeded",
    "DecodeState",
    "Distribution",
    "Engine",
    "Entropy",
    "Execution",
    "Forward",
    "Generation",
    "GenerationDefaults",
    "Generations",
    "Grammar",
    "HeadwayError",
    "Hidden",
    "InferenceEngine",
    "InvalidInput",
    "InvalidMask",
    "InvalidToken",
    "ItemFailed",
    "LogitLens",
    "Logits",
    "Logprob",
    "Logprobs",
    "Mask",
    "MinP",
    "ModelError",
    "ModelNotFound",
    "ModelOutput",
    "Multinomial",
    "OutOfMemory",
    "OutOfPages",
    "OutOfRange",
    "Output",
    "Part",
    "PassFailed",
    "Pipeline",
    "Prepared",
    "PreparedItem",
    "Probe",
    "ProbeHandle",
    "Rank",
    "Ranked",
    "Ranking",
    "Reasoning",
    "Reply",
    "Row",
    "SampleHandle",
    "Sampler",
    "Sampling",
    "SamplingParams",
    "SnapshotError",
    "Step",
    "Task",
    "TaskOptions",
    "TemplateError",
    "TokenBudgetExceeded",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolFailed",
    "ToolResult",
    "TopK",
    "TopKTopP",
    "TopP",
    "Typical",
    "Unsupported",
    "UnsupportedModel",
    "ValidationFailed",
    "WrongType",
    "generate",
    "pipeline",
    "register_task",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    with nullcontext() if f"headway.{home}" in sys.modules else gc_paused():
        module = import_module(f"headway.{home}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
