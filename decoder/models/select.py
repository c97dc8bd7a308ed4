"""Which form of a model computes: the CPU's compiled step, or the device step over the Triton kernels. The one place.

Owns the meaning of `--device` in a decoder, and that a device that is not there is refused by name with the reason.
Nothing of the GPU's is imported where the CPU computes.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from common.cuda_driver import Gpu, LoadDriver, load_bindings, open_gpu
from common.devices import CPU
from common.errors import FailedPrecondition, InvalidArgument
from common.layout import GROUPED_DTYPES, KvDtype, KvLayout
from decoder.models.config import ModelConfig, ModelDigests
from decoder.models.llama import CausalLM
from decoder.models.matrices import GroupedMatrices, Read
from decoder.models.packing import Memory
from decoder.models.weights import MakeMemory

WeightsOf = Callable[[ModelDigests, Any], Any]  # digests, DeviceLayout -> WeightMemory: the GPU's are not imported here

INTERPRETER: Final = "interpreter"
"""A device for tests: the GPU's form on the CPU. `--device` does not take it, `--fault interpreted_kernels=1` does."""
_SWITCH: Final = "TRITON_INTERPRET"  # read when triton is imported; `decoder/__main__.py` sets it


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """Where a decoder computes: on `gpu`, or on the CPU, there by the compiled kernels or by interpreted ones."""

    gpu: Gpu | None = None
    interpreted: bool = False

    @property
    def uses_triton(self) -> bool:
        """Whether the device step computes, and not the CPU's."""
        return self.interpreted or self.gpu is not None

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors lie."""
        return torch.device(CPU if self.gpu is None else f"cuda:{self.gpu.ordinal}")


ON_CPU: Final = ComputeDevice()


def resolve_device(device: str, dtype: str, load: LoadDriver = load_bindings) -> ComputeDevice:
    """The device that an option means: `cpu`, `cuda`, `cuda:GPU-<uuid>`, `auto`, or `interpreter`.

    Raises what `open_gpu` raises, FailedPrecondition (NO_GPU) that says why torch or Triton cannot compute on the GPU
    that was found, and InvalidArgument where the device lacks `dtype`.
    """
    if device == INTERPRETER:
        if dtype != "float32":
            raise InvalidArgument("dtype", f"is {dtype}; interpreted kernels compute float32 alone")
        if os.environ.get(_SWITCH) != "1":
            raise FailedPrecondition(f"kernels are not interpreted: {_SWITCH} was not set", reason="NO_GPU")
        return ComputeDevice(interpreted=True)
    gpu = open_gpu(device, load)
    if gpu is not None and dtype in GROUPED_DTYPES:
        raise InvalidArgument("dtype", f"is {dtype}; on a GPU give bfloat16 or float32, or --device cpu")
    if gpu is not None and (missing := _missing()):
        # The cache manager finds the same GPU, so `auto` must not quietly mean the CPU here.
        raise FailedPrecondition(f"--device {device}: {missing}; or give --device cpu", reason="NO_GPU")
    return ComputeDevice(gpu)


def _missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install -c constraints.txt -e '.[gpu]'"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this build of torch ({torch.__version__}) has no CUDA: install one that has"
    return "" if torch.cuda.is_available() else "torch can use no CUDA device in this process"


def build_model(
    device: ComputeDevice,
    config: ModelConfig,
    layout: KvLayout,
    digests: ModelDigests,
    read: Read,
    threads: int,
    report: Callable[[float], None],
    dtype: KvDtype,
    make_memory: MakeMemory = Memory,
    weights_of: WeightsOf | None = None,
    groups: GroupedMatrices | None = None,
) -> Any:
    """The model on a device: what `decoder.runner.StepModel` asks for, and `warm_up`.

    make_memory: where the CPU's weights lie
    weights_of:  where those of the device step lie; None: in memory of its own
    groups:      matrices as whole numbers in groups, on the CPU alone
    """
    if not device.uses_triton:
        return CausalLM(
            config, layout, digests, read, threads, report, dtype=dtype, make_memory=make_memory, groups=groups
        )
    from decoder.models.device_model import DeviceModel

    if device.gpu is not None:
        torch.cuda.set_device(device.torch_device)
    where = None if weights_of is None else functools.partial(weights_of, digests)
    return DeviceModel(config, layout, digests, read, device.torch_device, report, dtype=dtype, make_memory=where)
