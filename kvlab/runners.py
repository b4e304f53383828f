"""The runners that conf/runner/*.yaml names, each by the name it is chosen with: `runner=torch`, `simulated`, `recorded`.

A runner of your own is a function of (config, spec) that returns `kvlab.assembly.Parts`: `runner._target_=my_module.my_runner`.
"""

from kvlab.assembly import recorded_parts as recorded
from kvlab.assembly import simulated_parts as simulated
from kvlab.assembly import torch_parts as torch

__all__ = ["recorded", "simulated", "torch"]
