"""Export a checkpoint for OpenVINO GenAI. Runs in the rival's own environment.

    VENV/bin/python -m bench.peers.openvino_export CHECKPOINT MODEL

The exporter needs transformers 4, which reads the rotary embedding's sections and the limits of
a picture's size from other fields than the checkpoint has: it gets them both ways. It has no
bfloat16, so weights are stored as float16 (as many bytes; the engine computes in bfloat16).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OPTIONS = ("--task", "image-text-to-text", "--weight-format", "fp16")


def older_fields(checkpoint: Path, folder: Path) -> None:
    """Links to the checkpoint's files in `folder`, its two configurations with transformers 4's
    fields besides."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file.resolve())

    def rewrite(name: str, document: dict[str, Any]) -> None:
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")

    config = json.loads((checkpoint / "config.json").read_text())
    rope = config["text_config"]["rope_parameters"]
    scaling = {"type": "mrope", "rope_type": "default", "mrope_section": rope["mrope_section"]}
    config["text_config"] |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    rewrite("config.json", config)
    pictures = json.loads((checkpoint / "preprocessor_config.json").read_text())
    pictures["min_pixels"] = pictures["size"]["shortest_edge"]
    pictures["max_pixels"] = pictures["size"]["longest_edge"]
    rewrite("preprocessor_config.json", pictures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("model", type=Path)
    given = parser.parse_args()
    exporter = Path(sys.executable).with_name("optimum-cli")
    with tempfile.TemporaryDirectory() as folder:
        older_fields(given.checkpoint, Path(folder))
        command = [exporter, "export", "openvino", "-m", folder, *OPTIONS, given.model]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    main()
