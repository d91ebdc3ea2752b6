"""Triton kernels, one file a codec (installed as megatron_adacc.kernels).

Importing this package does not import Triton; `load` does. A kernel module can be loaded twice: for the GPU,
and as functions that Triton's interpreter runs on CPU tensors, which is decided when the module is imported.
"""

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

_INTERPRETED = "megatron_adacc._interpreted_kernels"


@functools.cache
def load(stem: str, *, interpret: bool) -> ModuleType:
    """The kernel module `stem`, for the GPU or for the interpreter. Cached like any import."""
    if not interpret:
        return importlib.import_module(f"{__name__}.{stem}")
    from triton import knobs

    if _INTERPRETED not in sys.modules:
        spec = importlib.util.spec_from_file_location(_INTERPRETED, __file__, submodule_search_locations=list(__path__))
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[_INTERPRETED] = package
        spec.loader.exec_module(package)
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        return importlib.import_module(f"{_INTERPRETED}.{stem}")
