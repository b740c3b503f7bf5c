"""The stand-in accelerator: a device of torch's own kind that is no CPU, with copies that really run beside the host.

Host memory, streams and events, asynchronous copies between pinned memory and the device, and counters of all that waits; its
kernels are the CPU's. It is compiled with g++ when it is registered first, which takes a minute and a half.
"""

from __future__ import annotations

import os
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("stand_in.cpp")
BUILD = Path(tempfile.gettempdir()) / f"trainprobe_stand_in_{os.getuid()}"


def register() -> Any:
    """Register npu:0 and npu:1, and return the extension; `stats()` of it gives and forgets the counters.

    TORCH_DEVICE_BACKEND_AUTOLOAD must be "0" before torch is imported.
    """
    from torch.utils.cpp_extension import load

    torch.utils.rename_privateuse1_backend("npu")
    BUILD.mkdir(mode=0o700, exist_ok=True)
    device = load("stand_in", [str(SOURCE)], build_directory=str(BUILD), extra_cflags=["-O0", "-w"])
    module: Any = types.ModuleType("torch.npu")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device, module.set_device = device.current_device, device.set_device
    module.current_stream = lambda where=None: torch.accelerator.current_stream(where)
    module.synchronize = lambda where=None: torch.accelerator.synchronize(where)
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module("npu", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return device
