"""Compiled kernels for CPUs: linear layers and attention near the memory's speed.

C++ behind a plain C ABI, compiled at first use where there is a compiler and the CPU
has AVX512_BF16, and kept in the user's cache folder. Everything works without them.
What they gain was measured: docs/kernels.md.
"""
