#!/usr/bin/env bash
# kvant eval's mean KL of llama.cpp's own cache types against llama-perplexity --kl-divergence on the same windows,
# positions and f32 weights: within 10 %.
set -euo pipefail
kvant="$KVANT_BIN/kvant"
perplexity="$KVANT_LLAMA_BIN/llama-perplexity"
[ -x "$perplexity" ] || { echo "no llama-perplexity"; exit 77; }
export KVANT_HOME="$KVANT_TEST_DIR/home"
cd "$KVANT_TEST_DIR"
text="$KVANT_TEXT_DIR/evaluation.txt"
windows=2 context=512

"$kvant" eval -m "$KVANT_MODEL" -f "$text" --kv llama:q8_0,llama:q4_0 --score second-half -c $context --windows $windows \
  --tests text --no-speed --json >eval.json
f32=("$KVANT_HOME"/f32/*.gguf)

run() { "$perplexity" -m "${f32[0]}" -f "$text" -c $context -b $context -ub $context --chunks $windows -fa on -dev none --no-warmup "$@" >log.txt 2>&1; }
run --kl-divergence-base base.kld || { tail -n 20 log.txt; exit 1; }
for type in q8_0 q4_0; do
  run --kl-divergence-base base.kld --kl-divergence -ctk $type -ctv $type || { tail -n 20 log.txt; exit 1; }
  sed -nE 's/^Mean +KLD: +([0-9.eE-]+).*/\1/p' log.txt >"kl-$type.txt"
done
rm -rf base.kld "$KVANT_HOME/f32"

python3 - <<'PYTHON'
import json
rows = {r["name"]: r for r in json.load(open("eval.json"))["rows"]}
for kind in ("q8_0", "q4_0"):
    ours, theirs = rows["llama:" + kind]["kl"]["mean"], float(open(f"kl-{kind}.txt").read())
    print(f"{kind}: kvant eval {ours:.6f}, llama-perplexity {theirs:.6f}")
    assert abs(ours - theirs) <= 0.1 * theirs, kind
    assert rows["llama:" + kind]["scored"] == 2 * (512 - 1 - 256)
PYTHON
