"""How K and V are stored."""

from kvlab.policies.kv_dtype.auto import Auto
from kvlab.policies.kv_dtype.bf16 import Bf16
from kvlab.policies.kv_dtype.fp8 import Fp8
from kvlab.policies.kv_dtype.fp16 import Fp16
from kvlab.policies.kv_dtype.fp32 import Fp32
from kvlab.policies.kv_dtype.int8 import Int8

__all__ = ["Auto", "Bf16", "Fp8", "Fp16", "Fp32", "Int8"]
