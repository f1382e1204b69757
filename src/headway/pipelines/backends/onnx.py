"""The onnxruntime backend: the model is exported once, kept in the cache, and computes the same numbers.

The export has dynamic rows and tokens. Its name is a hash of the model's weights and the exporter's version; cached
files are never unpickled, and onnxruntime runs no code from them.
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
from headway.pipelines.backends.torch import TorchBackend
from headway.pipelines.outputs import ModelOutput

EXTRA = "pip install 'headway[onnx]'"
OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")
OPSET = 18


class OnnxBackend(TorchBackend):
    """Runs the model in onnxruntime on the CPU. Outputs are those that tasks use: logits or final hidden states."""

    def __init__(self, backend: TorchBackend, inputs: Mapping[str, Tensor]) -> None:
        """Export the model of `backend`, unless it is in the cache; `inputs` is an example call."""
        runtime = _runtime()
        if (
            backend.device.type != "cpu"
            or backend.placement.dtype != torch.float32
            or backend.placement.autocast is not None
        ):
            raise Unsupported(f'backend="onnxruntime" computes float32 on a CPU, not {backend.placement}')
        self.module, self.placement = backend.module, backend.placement
        self.path = cached_export(backend.module, inputs)
        session_options = runtime.SessionOptions()
        session_options.intra_op_num_threads = torch.get_num_threads()
        self._session = runtime.InferenceSession(str(self.path), session_options, providers=["CPUExecutionProvider"])
        self._shapes = {one.name: one.shape for one in self._session.get_inputs()}
        self._inputs = list(self._shapes)
        self._outputs = [one.name for one in self._session.get_outputs()]

    def call_on_device(self, inputs: Mapping[str, Any], method: str, parameters: Mapping[str, Any]) -> Any:
        if method != "forward" or parameters or set(inputs) != set(self._inputs):
            names = ", ".join(sorted({*inputs, *parameters}))
            raise InvalidInput(
                f"the exported model takes {', '.join(self._inputs)} and nothing else, not {names}; "
                'use backend="torch" for other arguments'
            )
        for name in self._inputs:
            self._check_shape(name, tuple(inputs[name].shape))
        values = self._session.run(None, {name: inputs[name].numpy() for name in self._inputs})
        return ModelOutput(dict(zip(self._outputs, map(torch.from_numpy, values))))

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        expected = self._shapes[name]
        if len(expected) != len(shape) or any(isinstance(a, int) and a != b for a, b in zip(expected, shape)):
            raise InvalidInput(
                f"{name} is {list(shape)} and the model was exported for {list(expected)}; "
                'use backend="torch" for inputs of other shapes'
            )


def cached_export(module: nn.Module, inputs: Mapping[str, Tensor]) -> Path:
    """The cached model.onnx of this module, exported first if there is none."""
    folder = settings().cache / "pipelines" / "onnx" / _cache_name(module, inputs)
    target = folder / "model.onnx"
    if target.is_file():
        return target
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".export-", dir=folder.parent))
    try:
        _export(module, inputs, scratch / "model.onnx")
        try:
            os.replace(scratch, folder)
        except OSError:  # another process was faster
            if not target.is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _export(module: nn.Module, inputs: Mapping[str, Tensor], path: Path) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warnings; tests compare the numbers
        example = module(**inputs)
        names = [name for name in OUTPUTS if example.get(name) is not None]
        if not names:
            raise Unsupported(f"{type(module).__name__} has no output to export: none of {', '.join(OUTPUTS)}")
        # tokens and audio samples differ in length; images and feature matrices have one shape
        axes = {name: {0: "rows", 1: "tokens"} if value.ndim == 2 else {0: "rows"} for name, value in inputs.items()}
        for name in names:
            by_token = example[name].ndim == 3 or name.endswith(("start_logits", "end_logits"))
            axes[name] = {0: "rows", 1: f"{name} of a row"} if by_token else {0: "rows"}
        torch.onnx.export(
            _TupleOutputs(module, list(inputs), names).eval(),  # or the export would leave the model in training mode
            tuple(value.clone() for value in inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=names,
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
        )


class _TupleOutputs(nn.Module):
    """The model with positional inputs and a tuple of outputs, as the exporter requires."""

    def __init__(self, module: nn.Module, inputs: list[str], outputs: list[str]) -> None:
        super().__init__()
        self.module, self.inputs, self.outputs = module, inputs, outputs

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        output = self.module(**dict(zip(self.inputs, values)))
        return tuple(output[name] for name in self.outputs)


def _cache_name(module: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    """A hash of the weights, the config and the exporter's version."""
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
