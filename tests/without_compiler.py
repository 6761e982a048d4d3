"""Importing this keeps torch's compiler out of a job, which uses none of it.

torch loads the compiler, 2 s in every rank, when the first optimizer is made, only to exempt the
optimizer's own methods from it, and at its first step, only to tell the compiler where it stands.
Here the methods are exempt already, and nobody is told.
"""

import sys
from types import ModuleType

import torch

for _method in vars(torch.optim.Optimizer).values():
    if hasattr(_method, "__wrapped__"):
        _method.__wrapped__.__dynamo_disable = _method.__wrapped__
torch._dynamo = sys.modules["torch._dynamo"] = ModuleType("torch._dynamo")
torch._dynamo.graph_break = lambda: None
