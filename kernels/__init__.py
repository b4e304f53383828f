"""Paged-cache kernels: torch references and, beside them, Triton kernels, behind one small backend interface."""
