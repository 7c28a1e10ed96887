#!/usr/bin/env bash
# kvant eval: the documented JSON, figures that must hold on any machine, the bar, and a model with huge key biases.
set -euo pipefail
kvant="$KVANT_BIN/kvant"
export KVANT_HOME="$KVANT_TEST_DIR/home"
cd "$KVANT_TEST_DIR"
text="$KVANT_TEXT_DIR/evaluation.txt"

echo "-- a model whose keys have biases of +-60: q4_0 breaks, kvant's default does not"
"$kvant" testmodel --kind key-bias -o key-bias.gguf
"$kvant" testmodel --kind key-bias -o again.gguf
cmp key-bias.gguf again.gguf
"$kvant" eval -m key-bias.gguf -f "$text" --kv "llama:f16,llama:q8_0,llama:q4_0,exact,kv8,kv4;k=t4,v=t4,kx=hadamard" \
  -c 2048 --passage 256 --filler-tokens 1024 --speed-depth 256 --legs --json >biased.json
python3 - <<'PYTHON'
import json
j = json.load(open("biased.json"))
assert j["version"] == 1 and j["floor"]["text"]["kl"]["mean"] < 1e-4, j["floor"]
want = {"name", "test", "bits_per_value", "bits_k", "bits_v", "bytes_per_token", "bytes_per_token_asymptotic", "kl", "top1",
        "ppl_ratio", "quantized_read_share", "prefill_tok_s", "decode_tok_s", "peak_bytes"}
rows = {}
for r in j["rows"]:
    assert want <= set(r), want - set(r)
    assert set(r["kl"]) == {"mean", "lo", "hi", "median", "p99", "p999", "max"}, r["kl"]
    kl = r["kl"]
    assert kl["lo"] <= kl["mean"] <= kl["hi"] and kl["median"] <= kl["p99"] <= kl["p999"] <= kl["max"], r
    assert r["decode_tok_s"] > 0 and r["prefill_tok_s"] > 0 and r["peak_bytes"] > 0, r
    rows[r["name"], r["test"]] = r
text = {name: r for (name, test), r in rows.items() if test == "text"}
kl = {name: r["kl"]["mean"] for name, r in text.items()}
print({name: round(x, 6) for name, x in kl.items()})
assert kl["llama:f16"] == 0 and kl["exact"] < 1e-4
assert kl["llama:q4_0"] > 0.05 and kl["llama:q4_0"] > 10 * kl["kv4"], kl
assert kl["k=t4,v=t4,kx=hadamard"] > 5 * kl["kv4"], kl
assert kl["kv8"] < kl["kv4"], kl
assert text["exact"]["quantized_read_share"] == 0 and "not a quantization" in text["exact"]["note"]
assert 0.5 < text["kv4"]["quantized_read_share"] < 1
assert text["kv4 (keys only)"]["bits_v"] == 16 and text["kv4 (values only)"]["bits_k"] == 16
assert text["kv4"]["effective"][0]["layers"] == [0, 1] and text["kv4"]["effective"][0]["reason"] == ""
assert text["llama:q4_0"]["bits_k"] == 4.5 and text["llama:q4_0"]["bytes_per_token"] == 2 * 2 * 64 * 2 * 4.5 / 8
assert text["kv4"]["bytes_per_token"] > text["kv4"]["bytes_per_token_asymptotic"] > 2 * 2 * 64 * 2 * 4 / 8
PYTHON

echo "-- calibration names the biased channels; heads that a width breaks get wider bands and say so"
"$kvant" calibrate -m key-bias.gguf -f "$KVANT_TEXT_DIR/calibration.txt" --tokens 2048 -o biased-calibration.gguf \
  --json >calibration.json
"$kvant" eval -m key-bias.gguf -f "$text" --recipe biased-calibration.gguf --kv "k=t4,v=t4,kx=hadamard;kv4" -c 2048 \
  --tests text --no-speed --json >escaped.json
python3 - <<'PYTHON'
import json
outliers = json.load(open("calibration.json"))["outliers"]
found = {(o["layer"], o["head"], o["channel"]) for o in outliers if o["side"] == "key"}
biased = [28, 29, 30, 31, 60, 61, 62, 63]
assert found == {(layer, head, channel) for layer in (0, 1) for head in (0, 1) for channel in biased}, sorted(found)
assert all(50 < abs(o["mean"]) < 70 and 50 < o["rms"] < 70 and o["median_rms"] < 10 for o in outliers), outliers
before = {r["name"]: r["kl"]["mean"] for r in json.load(open("biased.json"))["rows"] if r["test"] == "text"}
rows = {r["name"]: r for r in json.load(open("escaped.json"))["rows"]}
rotated = rows["k=t4,v=t4,kx=hadamard"]
print({name: r["kl"]["mean"] for name, r in rows.items()})
for e in rotated["effective"]:
    assert "keys of KV head 0: expected error" in e["reason"] and "k=t4" in e["requested"], e
    assert "k=t7" in e["effective"], e
assert rotated["kl"]["mean"] < before["k=t4,v=t4,kx=hadamard"] / 10, (rotated["kl"], before)
assert rotated["bits_k"] > 7 and rows["kv4"]["kl"]["mean"] < before["llama:q4_0"] / 5
PYTHON
rc=0
"$kvant" eval -m key-bias.gguf -f "$text" --recipe biased-calibration.gguf --kv "k=t4,v=t4,kx=hadamard" -c 1024 --strict \
  --tests text --no-speed >/dev/null 2>strict.txt || rc=$?
[ "$rc" -eq 3 ]
grep -q "expected error" strict.txt

echo "-- what attention on packed codes costs against decoding tiles first, on a real model"
"$kvant" eval -m "$KVANT_MODEL" -f "$text" --kv 'kv4;k=t4,v=t4;kv8;exact' -c 1024 --tests text --no-speed --both-paths --json >paths.json
python3 - <<'PYTHON'
import json
rows = {r["name"]: r for r in json.load(open("paths.json"))["rows"]}
print({name: r["fused"] for name, r in rows.items() if "fused" in r})
assert "fused" not in rows["exact"]
for name in ("kv4", "k=t4,v=t4", "kv8"):
    # Channel scales of kv4's keys are folded into q before it is rounded, which costs most.
    assert 0 < rows[name]["fused"]["share"] < (0.1 if name == "kv4" else 0.05), (name, rows[name]["fused"])
PYTHON

echo "-- biases can be planted into a model of the Llama family"
"$kvant" testmodel --kind shapes --layers 3 --heads 4 --kv-heads 2 --head-dim 64 -o plain.gguf
"$kvant" testmodel --kind planted -m plain.gguf -o planted.gguf
"$kvant" calibrate -m planted.gguf -f "$KVANT_TEXT_DIR/calibration.txt" --tokens 1024 --window 1024 -o planted-calibration.gguf \
  --json >planted.json
python3 - <<'PYTHON'
import json
found = {(o["layer"], o["head"], o["channel"]) for o in json.load(open("planted.json"))["outliers"] if o["side"] == "key"}
assert found == {(layer, head, channel) for layer in (0, 2) for head in (0, 1) for channel in (60, 61, 62, 63)}, found
PYTHON

echo "-- the same run gives the same quality, with any chunk the figures stay within the floor"
args=(-m key-bias.gguf -f "$text" --kv kv4 -c 1024 --tests text --no-speed --json)
"$kvant" eval "${args[@]}" >one.json
"$kvant" eval "${args[@]}" >two.json
python3 -c 'import json; a,b=(json.load(open(f))["rows"][0]["kl"] for f in ("one.json","two.json")); assert a==b, (a,b)'

echo "-- tables, the bar and its exit code"
"$kvant" eval -m key-bias.gguf -f "$text" --kv llama:q4_0,kv4 -c 1024 --tests text --no-speed --markdown >table.md
for start in '| cache ' '| kv4 ' Floor; do grep -q "^$start" table.md; done
rc=0
"$kvant" eval -m key-bias.gguf -f "$text" --kv kv4 -c 1024 --tests text --no-speed --max-kl 0.0000001 >/dev/null 2>bar.txt || rc=$?
[ "$rc" -eq 8 ]
grep -q -- "--max-kl" bar.txt

echo "-- layers with a sliding window"
"$kvant" testmodel --kind shapes --layers 6 --heads 4 --kv-heads 1 --head-dim 96 --swa 256 -o windows.gguf
"$kvant" eval -m windows.gguf -f "$text" --kv exact,kv8 -c 2048 --tests text --no-speed --json >windows.json
python3 - <<'PYTHON'
import json
rows = {r["name"]: r for r in json.load(open("windows.json"))["rows"]}
print({n: r["kl"]["mean"] for n, r in rows.items()})
assert rows["exact"]["kl"]["mean"] < 1e-3
assert rows["kv8"]["kl"]["mean"] < 0.05 and rows["kv8"]["quantized_read_share"] > 0
# Only the layer that sees everything grows.
assert rows["exact"]["bytes_per_token_asymptotic"] == 2 * 96 * 2, rows["exact"]
PYTHON

echo "-- Ctrl-C prints what is finished"
"$kvant" eval -m "$KVANT_MODEL" -f "$text" --weights native --kv llama:q4_0 -c 8192 --windows 4 --tests text --no-speed \
  >interrupted.txt 2>progress.txt &
pid=$!
for _ in $(seq 3000); do [ -s progress.txt ] && break; sleep 0.1; done
kill -INT "$pid"
rc=0
wait "$pid" || rc=$?
[ "$rc" -eq 130 ] || { echo "exit $rc after SIGINT"; exit 1; }
grep -q "interrupted" interrupted.txt
# Not a terminal: whole lines, without carriage returns, one per part.
grep -Eqx 'kvant: +[0-9]+ %(, [0-9]+:[0-9]{2} left)?, text 1/4' progress.txt
if grep -qv '^kvant: .* text [1-4]/4$' progress.txt || grep -q $'\r' progress.txt; then
  cat -A progress.txt
  exit 1
fi
echo "eval works"
