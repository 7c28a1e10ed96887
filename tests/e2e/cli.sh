#!/usr/bin/env bash
# The commands do what docs/cli.md says, on the real model and on small ones.
set -euo pipefail
kvant="$KVANT_BIN/kvant"
model="$KVANT_MODEL"
export KVANT_HOME="$KVANT_TEST_DIR/home"
cd "$KVANT_TEST_DIR"

say() { echo "-- $*"; }
json() { python3 -c 'import json,sys; j=json.load(open(sys.argv[1])); sys.exit(0 if eval(sys.argv[2]) else 1)' "$1" "$2" || { echo "$1: not true: $2"; exit 1; }; }

say "every command explains itself with examples"
for command in run eval formats plan env testmodel; do
  "$kvant" $command --help >help.txt
  grep -q "Examples:" help.txt
done
"$kvant" --help >help.txt
grep -q "130  interrupted" help.txt
"$kvant" --version | grep -E '^kvant [0-9.]+ \(ggml [0-9.]+\)$' >/dev/null

say "the exit codes of docs/cli.md are those of --help"
sed -n '/^Exit codes:/,$p' help.txt | sed -nE 's/^ *([0-9]+)  (.*)$/| \1 | \2 |/p' >codes.txt
[ "$(wc -l <codes.txt)" -ge 10 ]
while read -r line; do grep -qF "$line" "$KVANT_ROOT/docs/cli.md" || { echo "docs/cli.md lacks: $line"; exit 1; }; done <codes.txt

say "formats"
"$kvant" formats --json >formats.json
json formats.json 'j["version"] == 1 and len(j["formats"]) > 5 and all(2 <= f["bits_k"] <= 17 for f in j["formats"])'
json formats.json '{"exact", "kv8", "kv4"} <= {s["name"] for s in j["schemes"]}'
"$kvant" formats >formats.txt
python3 - <<'PYTHON'
import json, re
ids = {f["name"]: f["id"] for f in json.load(open("formats.json"))["formats"]}
shown = dict(re.findall(r"^(\S+) +(0x[0-9a-f]{8}) ", open("formats.txt").read(), re.M))
assert {name: int(text, 16) for name, text in shown.items()} == ids, (shown, ids)
PYTHON
python3 - <<'PYTHON'
import json, subprocess, os
kvant = os.environ["KVANT_BIN"] + "/kvant"
for f in json.load(open("formats.json"))["formats"]:
    for side in ("key", "value"):
        tile = json.loads(subprocess.check_output([kvant, "formats", "--explain", f["name"], "--side", side, "--json"]))
        at = 0
        for part in tile["parts"]:
            assert part["offset"] == at, (f["name"], side, part)
            at += part["bytes"]
        assert at == tile["tile_bytes"] == f["tile_bytes_k" if side == "key" else "tile_bytes_v"], (f["name"], side)
PYTHON
"$kvant" formats --explain t5-3 >tile.txt
python3 - <<'PYTHON'
import re
text = open("tile.txt").read()
rows = re.findall(r"\n +(\d+)  \+-+\+\n +\| (.*?) +\| +(\d+) +[0-9.]+(?=\n)", text)
assert rows and "5 bits" in text and "3 bits" in text and "e = 4 * (c / 4) + t / 16" in text, text
at = 0
for offset, what, size in rows:
    assert int(offset) == at, (offset, at, what)
    at += int(size)
assert f"takes {at} bytes" in text and "band 1  codes, bit 2 (1-bit plane)" in text, text
assert any(what.startswith("trailer") for _, what, _ in rows)
PYTHON
json formats.json '{s["name"] for s in j["schemes"] if s["comparison"]} == {"cmp-static-tensor", "cmp-static-head", "cmp-kivi4", "cmp-kivi2", "cmp-groups8", "cmp-groups4"}'
json formats.json '{f["name"] for f in j["formats"] if f["comparison"]} >= {"s8", "st8", "g4"}'

say "plan: a model file and the same shape by hand agree"
"$kvant" plan -m "$model" -c 2048 --kv kv4 --json >a.json
"$kvant" plan --layers 30 --query-heads 9 --kv-heads 3 --head-dim 64 -c 2048 --kv kv4 --json >b.json
python3 -c 'import json; a,b=(json.load(open(f))["plans"] for f in ("a.json","b.json")); assert a==b, (a,b)'

say "plan: llama.cpp's own caches, to the byte that llama.cpp allocates"
for types in q4_0 q8_0/q4_1 f32; do
  "$kvant" plan -m "$model" -c 1000 --kv "kv4,llama:$types" --json >peer.json
  "$kvant" run -v -m "$model" -p x -n 1 -c 1000 --kv "llama:$types" >/dev/null 2>peer.txt
  python3 - <<'PYTHON'
import json, re
plan = json.load(open("peer.json"))["plans"][1]["bytes"]
mib = float(re.search(r"KV buffer size = +([0-9.]+) MiB", open("peer.txt").read())[1])
assert abs(plan["total"] / 2**20 - mib) < 0.006, (plan, mib)
assert plan["total"] == plan["packed"] + plan["exact_rows"], plan
PYTHON
done

say "run: completes, counts, and plan said the same bytes"
"$kvant" run -m "$model" -f "$KVANT_TEXT_DIR/calibration.txt" -c 8192 --kv kv4 2>/dev/null --json >too-long.json && rc=0 || rc=$?
[ "$rc" -eq 5 ]
head -c 6000 "$KVANT_TEXT_DIR/calibration.txt" >prompt.txt
"$kvant" run -m "$model" -f prompt.txt -n 8 --temp 0 -c 4096 --kv k=c4,v=t4,vx=hadamard --json >run.json
json run.json 'j["decode"]["tokens"] == 8 and j["cache"]["quantized_read_share"] > 0.3 and j["cache"]["packed"] > 0'
json run.json 'j["cache"]["total"] < 0.7 * j["cache"]["f16"] + j["cache"]["workspace"]'
tokens=$(python3 -c 'import json; print(json.load(open("run.json"))["cache"]["tokens"])')
"$kvant" plan -m "$model" -c 4096 --kv k=c4,v=t4,vx=hadamard --json >whole.json
"$kvant" plan -m "$model" -c "$tokens" --kv k=c4,v=t4,vx=hadamard --json >plan.json
python3 - <<'PYTHON'
import json
run, plan = json.load(open("run.json"))["cache"], json.load(open("plan.json"))["plans"][0]["bytes"]
whole = json.load(open("whole.json"))["plans"][0]["bytes"]
# Rows and tiles follow the tokens, tables the context.
for name, want in (("packed", plan["packed"]), ("exact_rows", plan["exact_rows"]), ("tables", whole["tables"]),
                   ("workspace", whole["workspace"])):
    assert run[name] == want, (name, run[name], want)
PYTHON

say "plan takes the calibration that run takes: the same bits and bytes"
"$kvant" testmodel --kind shapes --layers 2 --head-dim 64 -o recipe.gguf
"$kvant" calibrate -m recipe.gguf -f prompt.txt --tokens 512 --window 512 -o recipe.cal >calibrated.txt 2>&1
"$kvant" run -m recipe.gguf -f prompt.txt -n 1 --temp 0 -c 8192 --kv kv3 --recipe recipe.cal --json >run.json
tokens=$(python3 -c 'import json; print(json.load(open("run.json"))["cache"]["tokens"])')
KVANT_RECIPE=recipe.cal "$kvant" plan -m recipe.gguf -c "$tokens" --kv kv3 --json >plan.json
json plan.json 'j["calibrated"] and j["overridden"] == []'
KVANT_RECIPE=none "$kvant" plan -m recipe.gguf -c "$tokens" --kv kv3 --recipe recipe.cal --json >override.json
json override.json 'j["calibrated"] and j["overridden"] == ["KVANT_RECIPE=none is overridden by --recipe recipe.cal"]'
"$kvant" plan -m recipe.gguf --kv kv3 --recipe none --json >none.json
json none.json 'not j["calibrated"]'
python3 - <<'PYTHON'
import json
run, plan = json.load(open("run.json"))["cache"], json.load(open("plan.json"))["plans"][0]
for name in ("packed", "exact_rows"):
    assert run[name] == plan["bytes"][name], (name, run, plan)
assert plan["bits_per_value"] == 3.5, plan
PYTHON

say "run: greedy text of the exact cache is llama.cpp's (f32 weights: others round activations)"
"$kvant" testmodel --kind shapes --layers 3 --head-dim 80 -o small.gguf
"$kvant" run -m small.gguf -f prompt.txt -n 100 --temp 0 -c 8192 --kv exact 2>summary.txt >exact.txt
"$kvant" run -m small.gguf -f prompt.txt -n 100 --temp 0 -c 8192 --kv llama:f16 2>/dev/null >f16.txt
cmp exact.txt f16.txt
[ "$(wc -c <exact.txt)" -gt 6050 ]
grep -q "f16 rows .* bytes: the cache is [1-9][0-9.]* times larger" summary.txt || { echo "exact rows and tables are not called larger"; exit 1; }
for part in "exact rows" "packed tiles" tables workspace "f16 rows" "tok/s"; do grep -q "$part" summary.txt || { echo "no '$part' in the summary"; exit 1; }; done

say "run: the parts of a decode step add up"
"$kvant" run -m "$model" -f prompt.txt -n 80 --ignore-eos --temp 0 --kv kv4,w=0 --profile --json >profile.json
cp profile.json profile-1.json
for attempt in 2 3; do "$kvant" run -m "$model" -p Hello -n 80 --ignore-eos --kv kv4,w=0 --profile --json >profile-$attempt.json; done
json profile.json 'j["profile"]["steps"] == 80 == j["decode"]["tokens"]'
json profile.json 'all(j["profile"][p + "_seconds"] > 0 for p in ("weights", "attention", "encode", "sampling", "other"))'
json profile.json 'abs(sum(j["profile"][p + "_seconds"] for p in ("weights", "attention", "encode", "sampling", "other")) - j["profile"]["seconds"]) < 1e-6'
# A busy machine may stretch any part of one run.
python3 - <<'PYTHON'
import json
runs = [json.load(open(f"profile-{n}.json"))["profile"] for n in (1, 2, 3)]
assert any(p["weights_seconds"] > 5 * p["encode_seconds"] for p in runs), runs
PYTHON
"$kvant" run -m "$model" -p "Hello" -n 2 --profile >/dev/null 2>parts.txt
grep -Eq "^  attention +[0-9.]+ ms +[0-9.]+ %" parts.txt
code=0
"$kvant" run -m "$model" -p "Hello" -n 2 --profile --kv llama:f16 >/dev/null 2>&1 || code=$?
[ "$code" -eq 3 ]

say "run: chat over two turns, from a pipe"
printf 'What is the capital of France?\nAnd what is the capital of Italy?\n' |
  "$kvant" run -m "$model" --temp 0 -n 40 2>/dev/null >chat.txt
if ! grep -q "Paris" chat.txt || ! grep -q "Rome" chat.txt || grep -q "im_" chat.txt; then
  cat chat.txt
  exit 1
fi

say "run: Ctrl-C ends cleanly with the summary"
"$kvant" run -m "$model" -p "Once upon a time" -n 100000 --ignore-eos -c 8192 >long.txt 2>long-summary.txt &
pid=$!
for _ in $(seq 1200); do [ -s long.txt ] && break; sleep 0.1; done
sleep 1
kill -INT "$pid"
rc=0
wait "$pid" || rc=$?
[ "$rc" -eq 130 ] || { echo "exit $rc after SIGINT"; exit 1; }
grep -q "workspace" long-summary.txt

say "flags win over variables, and that is said"
KVANT_KV=kv8 "$kvant" run -m "$model" -p "Hello" -n 2 --kv kv4 --json >override.json
json override.json '"KVANT_KV=kv8 is overridden by --kv kv4" in j["overridden"] and j["kv"] == "kv4"'
KVANT_KV=kv8 "$kvant" run -m "$model" -p "Hello" -n 2 --json >variable.json
json variable.json 'j["kv"] == "kv8"'
KVANT_KV=kv5,llama:q8_0 "$kvant" plan -m "$model" --json >variable.json
json variable.json '[p["kv"] for p in j["plans"]] == ["kv5", "llama:q8_0"] and j["overridden"] == []'
KVANT_KV=kv5 "$kvant" plan -m "$model" --kv kv3 --json >override.json
json override.json 'j["plans"][0]["kv"] == "kv3" and j["overridden"] == ["KVANT_KV=kv5 is overridden by --kv kv3"]'
KVANT_KV=kv5 "$kvant" plan -m "$model" --kv kv3 2>said.txt >plan.txt
grep -qx "kvant: KVANT_KV=kv5 is overridden by --kv kv3" said.txt
KVANT_KV="kv8;exact" "$kvant" eval -m small.gguf -f "$KVANT_TEXT_DIR/evaluation.txt" -c 1024 --tests text --no-speed --json >variable.json
json variable.json '[r["name"] for r in j["rows"]] == ["kv8", "exact"]'

say "a variable that nothing reads is said, once, and changes nothing"
"$kvant" env >plain.txt
KVANT_FOO=1 "$kvant" env >env.txt 2>said.txt
cmp plain.txt env.txt
[ "$(cat said.txt)" = "kvant: warning: KVANT_FOO: not a variable of kvant, ignored; nearest is KVANT_KV" ]

say "env: the exports name this build"
"$kvant" env --kv kv8,w=64 --attention dequant >env.txt
grep -qx "export GGML_BACKEND_PATH=$KVANT_BIN/libggml-kvant.so" env.txt
grep -qx "export KVANT_KV=kv8,w=64" env.txt
grep -qx "export KVANT_ATTENTION=dequant" env.txt
json <("$kvant" env --json) 'j["environment"]["LLAMA_ARG_DEVICE"] == "KVANT"' || exit 1
echo "all commands work"
