"""onnxruntime as a backend: the model is exported once, kept in the cache, and gives the same numbers.

The export has dynamic rows and tokens. It is named after the model's weights and the versions that made it; a file in
the cache is never trusted to be a pickle, and onnxruntime runs no code from it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.base.config import settings
from headway.base.errors import InvalidInput, Unsupported
from headway.pipelines.backends.forward import Forward
from headway.pipelines.outputs import ModelOutput

EXTRA = "pip install 'headway[onnx]'"
ANSWERS = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")
OPSET = 18


class OnnxForward(Forward):
    """A Forward whose model runs in onnxruntime on the CPU. It answers what tasks read: logits or final states."""

    def __init__(self, run: Forward, inputs: Mapping[str, Tensor]) -> None:
        """Export `run`'s model, or find its export; `inputs` are an example of what it is called with."""
        runtime = _runtime()
        if run.device.type != "cpu" or run.placement.dtype != torch.float32 or run.placement.autocast is not None:
            raise Unsupported(f'backend="onnxruntime" computes float32 on a CPU, not {run.placement}')
        self.module, self.placement = run.module, run.placement
        self.path = exported(run.module, inputs)
        asked = runtime.SessionOptions()
        asked.intra_op_num_threads = torch.get_num_threads()
        self._session = runtime.InferenceSession(str(self.path), asked, providers=["CPUExecutionProvider"])
        self._shapes = {one.name: one.shape for one in self._session.get_inputs()}
        self._inputs = list(self._shapes)
        self._outputs = [one.name for one in self._session.get_outputs()]

    def call_on_device(self, inputs: Mapping[str, Any], method: str, parameters: Mapping[str, Any]) -> Any:
        if method != "forward" or parameters or set(inputs) != set(self._inputs):
            asked = ", ".join(sorted({*inputs, *parameters}))
            raise InvalidInput(
                f"the exported model takes {', '.join(self._inputs)} and nothing else, not {asked}; "
                'use backend="torch" for other arguments'
            )
        for name in self._inputs:
            self._check_shape(name, tuple(inputs[name].shape))
        found = self._session.run(None, {name: inputs[name].numpy() for name in self._inputs})
        return ModelOutput(dict(zip(self._outputs, map(torch.from_numpy, found))))

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        wanted = self._shapes[name]
        if len(wanted) != len(shape) or any(isinstance(a, int) and a != b for a, b in zip(wanted, shape)):
            raise InvalidInput(
                f"{name} is {list(shape)} and the model was exported for {list(wanted)}; "
                'use backend="torch" for inputs of other shapes'
            )


def exported(module: nn.Module, inputs: Mapping[str, Tensor]) -> Path:
    """The folder's model.onnx for this module, made if it is not there."""
    folder = settings().cache / "pipelines" / "onnx" / _name(module, inputs)
    target = folder / "model.onnx"
    if target.is_file():
        return target
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".export-", dir=folder.parent))
    try:
        _export(module, inputs, scratch / "model.onnx")
        try:
            os.replace(scratch, folder)
        except OSError:  # another process was quicker
            if not target.is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _export(module: nn.Module, inputs: Mapping[str, Tensor], path: Path) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's remarks on tracing; the numbers are compared in the tests
        whole = module(**inputs)
        found = [name for name in ANSWERS if whole.get(name) is not None]
        if not found:
            raise Unsupported(f"{type(module).__name__} answers none of {', '.join(ANSWERS)}, which can be exported")
        # sequences of tokens or samples differ in length; pictures and tables of features are all of one shape
        axes = {name: {0: "rows", 1: "tokens"} if value.ndim == 2 else {0: "rows"} for name, value in inputs.items()}
        for name in found:
            by_token = whole[name].ndim == 3 or name.endswith(("start_logits", "end_logits"))
            axes[name] = {0: "rows", 1: f"{name} of a row"} if by_token else {0: "rows"}
        torch.onnx.export(
            _Answers(module, list(inputs), found).eval(),  # or the export would leave the model in training mode
            tuple(value.clone() for value in inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=found,
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
        )


class _Answers(nn.Module):
    """The model with inputs by position and its answers as a tuple, as the exporter wants them."""

    def __init__(self, module: nn.Module, names: list[str], answers: list[str]) -> None:
        super().__init__()
        self.module, self.names, self.answers = module, names, answers

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        found = self.module(**dict(zip(self.names, values)))
        return tuple(found[name] for name in self.answers)


def _name(module: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    """A name that changes with the weights, the shape of the model and what exports it."""
    digest = hashlib.sha256()
    config = getattr(module, "config", None)
    facts = (type(module).__qualname__, config.to_json_string() if config is not None else "", torch.__version__, OPSET)
    digest.update(repr((facts, sorted(inputs))).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _runtime() -> Any:
    try:
        import onnx
        import onnxruntime
    except ImportError:
        raise Unsupported(f'backend="onnxruntime" needs onnx and onnxruntime: {EXTRA}') from None
    assert onnx is not None
    return onnxruntime
