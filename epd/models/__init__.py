"""The model layer: transformers' own models, one part at a time."""

import os

# Before anything here imports transformers, which reads them once: a checkpoint is a
# local folder, and nothing about it is ever looked up on a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
