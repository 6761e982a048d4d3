"""Python imports this as it starts, where this folder is on PYTHONPATH: ranks of tests start fast.

Most of what a test's job does is start its ranks, and most of that is loading what no test uses:
torch's compiler, and its formulas for tensors without data.  With so many objects that stay, the
collector of cycles would look at all of them again and again.
"""

import gc
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

WITHOUT_NUMBA = "MPIFLEET_TEST_WITHOUT_NUMBA"
"""A variable of the environment: rows are then updated by torch."""


class Formulas:
    """Finds torch._meta_registrations, the formulas, and loads the one thing of it that is used."""

    def find_spec(self, name, _path=None, _target=None):
        """See importlib.abc.MetaPathFinder."""
        return ModuleSpec(name, self) if name == "torch._meta_registrations" else None

    def create_module(self, _spec):
        """See importlib.abc.Loader."""

    def exec_module(self, _module):
        """See importlib.abc.Loader. Only with this can torch.Generator be called."""
        torch = sys.modules["torch"]
        if hasattr(torch._C, "_set_generator_metaclass"):
            from torch._opaque_base import OpaqueBaseMeta

            torch._C._set_generator_metaclass(OpaqueBaseMeta)


gc.set_threshold(50_000, 20, 50)
sys.meta_path.insert(0, Formulas())
# torch calls it when the first optimizer is made, to exempt the optimizer's own methods from it,
# and at the first step, to tell it where it stands.
compiler = sys.modules["torch._dynamo"] = ModuleType("torch._dynamo")
compiler.disable = lambda function, *_, **__: function
compiler.graph_break = lambda: None
compiler.config = SimpleNamespace(error_on_nested_fx_trace=True)  # torch.utils.checkpoint asks
if os.environ.get(WITHOUT_NUMBA):
    sys.modules["numba"] = None  # importing it is an ImportError
