"""Is there a GPU? Asked without importing torch, which takes seconds."""

import ctypes
import importlib.util
import runpy
from pathlib import Path


def cuda_is_usable() -> bool:
    """Whether the installed torch is built for CUDA and the driver shows at least one device."""
    return _torch_has_cuda() and _cuda_device_count() > 0


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return version.get("cuda") is not None


def _cuda_device_count() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
