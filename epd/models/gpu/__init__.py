"""Attention over the paged cache on GPUs, and decode steps as CUDA graphs.

Written without a GPU: what of it runs on a CPU is tested there (docs/gpu.md).
"""
