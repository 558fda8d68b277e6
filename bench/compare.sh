#!/usr/bin/env bash
# compare.sh CHECKPOINT OUT MINUTES [options of bench.compare]: everything of
# docs/benchmarks.md that wants a machine to itself, in about MINUTES (at least 8): gateway, stages,
# then epd beside its rivals for the time that is left.
set -euo pipefail
checkpoint=${1:?a checkpoint}; out=${2:?a folder}; minutes=${3:?minutes}; shift 3
python=${PYTHON:-python}
end=$(($(date +%s) + minutes * 60))
mkdir -p "$out"
"$python" -m bench.gateway.overhead --requests 40 --json "$out/gateway.json" | tee "$out/gateway.md"
"$python" -m epd.cli bench ceiling | tee "$out/ceiling.txt"
"$python" -m epd.cli bench stage "$checkpoint" --only compute,transfer --rounds 7 \
  --json "$out/stage.json" | tee "$out/stage.md"
left=$(((end - $(date +%s)) / 60))
"$python" -m bench.compare "$checkpoint" "$out" --minutes "$left" "$@"
