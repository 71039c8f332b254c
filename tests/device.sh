#!/usr/bin/env bash
# Train, decode, evaluate and check identity on one CUDA GPU, in under eight minutes.
#
#   tests/device.sh TARGET [OUT]          on a machine with a GPU
#   tests/device.sh --cpu TARGET [OUT]    the same at toy size without one: a test of this script
#
# TARGET is a folder of a Hugging Face model with its tokenizer (drafthead fetch-demo DIR makes one);
# OUT takes the results (default: a new folder in /tmp). PYTHON names an interpreter whose environment holds
# drafthead's dependencies (pip install -c constraints.txt -e .; with a CUDA build of torch); the repository need not
# be installed there. Nothing is downloaded. Two to three minutes on one H200-class GPU are expected, not measured.
set -euo pipefail

cpu=false
if [ "${1:-}" = --cpu ]; then cpu=true; shift; fi
if [ $# -lt 1 ] || [ ! -f "$1/config.json" ]; then
  echo "usage: PYTHON=... tests/device.sh [--cpu] TARGET [OUT]; TARGET is a folder with a config.json" >&2
  exit 2
fi
target=$(cd "$1" && pwd)
out=${2:-$(mktemp -d /tmp/drafthead-device.XXXXXX)}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=passive

# The folders are subpackages: a link to each makes `import drafthead` work without an installation.
mkdir -p "$out/path/drafthead"
for package in configs data heads inference train; do
  ln -sfn "$root/$package" "$out/path/drafthead/$package"
done
export PYTHONPATH="$out/path:$root/tests${PYTHONPATH:+:$PYTHONPATH}"

has_gpu=$("$python" -c 'import torch; print(torch.cuda.is_available())') || {
  echo "device.sh: $python has no working torch; name another with PYTHON=" >&2
  exit 2
}
if [ "$has_gpu" != True ] && ! $cpu; then
  echo "device.sh: no CUDA GPU is visible to $python; --cpu runs the same at toy size" >&2
  exit 3
fi

if $cpu; then
  export CUDA_VISIBLE_DEVICES=
  size=(data.positions=3000 data.heldout_positions=600 training.tokens_per_batch=512 data.max_length=256
        head.warm_start=0 head.draft_vocab_size=2048 training.max_steps=3)
  prompts=2 tokens=8 identity=1
else
  size=(training.tokens_per_batch=16384 training.epochs=2)
  prompts=24 tokens=128 identity=4
fi

drafthead() { "$python" -m drafthead.train.cli "$@"; }
stage() { echo "== $1 (${SECONDS} s)" >&2; }

stage forecast
drafthead estimate --config smollm2-eagle3 "target.name=$target" "${size[@]}" --json > "$out/forecast.json"
stage train
rm -rf "$out/run"
drafthead train --config smollm2-eagle3 "target.name=$target" "out=$out/run" "${size[@]}" --json > "$out/train.json"
stage "resume (a finished run is gone on with, so that the optimiser's state is read back)"
drafthead train --config smollm2-eagle3 "target.name=$target" "out=$out/run" "${size[@]}" --resume --json \
  > "$out/resume.json"
stage "decode in bf16 and evaluate, identity in fp32"
for tree in chain:3 tree:4x4:12; do
  drafthead evaluate --target "$target" --head "$out/run/head" --dtype bfloat16 --tree "$tree" --limit "$prompts" \
    --max-new-tokens "$tokens" --identity "$identity" --json > "$out/evaluate-${tree%%:*}.json"
done
stage generate
drafthead generate --target "$target" --head "$out/run/head" --dtype bfloat16 --temperature 0.7 --seed 1 \
  --max-new-tokens "$tokens" --prompt "Why is the sky blue?" --json > "$out/generate.json"
stage check
"$python" "$root/tests/device_check.py" "$out" "$($cpu && echo cpu || echo cuda)"
stage "done, results in $out"
