#!/usr/bin/env bash
# kvant eval's mean KL against that of stock llama-perplexity --kl-divergence on the same windows, positions and f32
# weights: within 10 %, for llama.cpp's own cache types and for kvant's schemes through the loaded backend.
set -euo pipefail
kvant="$KVANT_BIN/kvant"
perplexity="$KVANT_LLAMA_BIN/llama-perplexity"
[ -x "$perplexity" ] || { echo "no llama-perplexity"; exit 77; }
export KVANT_HOME="$KVANT_TEST_DIR/home"
cd "$KVANT_TEST_DIR"
text="$KVANT_TEXT_DIR/evaluation.txt"
windows=2 context=512
schemes=("kv5,w=64" "kv4,w=64" "kv3,w=64")

"$kvant" eval -m "$KVANT_MODEL" -f "$text" --kv "llama:q8_0;llama:q4_0$(printf ';%s' "${schemes[@]}")" \
  --score second-half -c $context --windows $windows \
  --tests text --no-speed --json >eval.json
f32=("$KVANT_HOME"/f32/*.gguf)

run() {
  "$perplexity" -m "${f32[0]}" -f "$text" -c $context -b $context -ub $context --chunks $windows -fa on --no-warmup "$@" \
    >log.txt 2>&1
}
keep_kl() { sed -nE 's/^Mean +KLD: +([0-9.eE-]+).*/\1/p' log.txt >"$1.kl"; }
run -dev none --kl-divergence-base base.kld || { tail -n 20 log.txt; exit 1; }
for type in q8_0 q4_0; do
  run -dev none --kl-divergence-base base.kld --kl-divergence -ctk $type -ctv $type || { tail -n 20 log.txt; exit 1; }
  keep_kl "llama:$type"
done
for scheme in "${schemes[@]}"; do
  GGML_BACKEND_PATH="$KVANT_BIN/libggml-kvant.so" KVANT_KV="$scheme" run --device KVANT --kl-divergence-base base.kld --kl-divergence ||
    { tail -n 20 log.txt; exit 1; }
  grep -q "% of key reads from packed tiles" log.txt
  keep_kl "$scheme"
done
rm -rf base.kld "$KVANT_HOME/f32"

python3 - <<'PYTHON'
import json
rows = {r["name"]: r for r in json.load(open("eval.json"))["rows"]}
assert len(rows) == 5
for name, row in rows.items():
    ours, theirs = row["kl"]["mean"], float(open(name + ".kl").read())
    print(f"{name}: kvant eval {ours:.6f}, llama-perplexity {theirs:.6f}")
    assert abs(ours - theirs) <= 0.1 * theirs, name
    assert row["scored"] == 2 * (512 - 1 - 256)
PYTHON
