"""How K and V are stored."""

from kvlab.policies.kv_dtype.auto import Auto
from kvlab.policies.kv_dtype.bf16 import Bf16
from kvlab.policies.kv_dtype.fp16 import Fp16
from kvlab.policies.kv_dtype.fp32 import Fp32

__all__ = ["Auto", "Bf16", "Fp16", "Fp32"]
