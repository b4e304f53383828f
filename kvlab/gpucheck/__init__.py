"""`python -m kvlab.gpucheck`: is this card served rightly, and how far from its limits?

One call validates and measures everything on a GPU in a few minutes: errors of the kernels against float64, their bandwidth and rate
against the card's own, latency over block size, decoding against transformers, tokens across policies, swap and CUDA graphs. It needs
torch, triton, transformers, pandas, pyarrow and safetensors, and nothing else. `--dry` runs the same code with small sizes on a CPU, in
Triton's interpreter: it tests the script, its times mean nothing.
"""
