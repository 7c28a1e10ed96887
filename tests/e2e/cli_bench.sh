#!/usr/bin/env bash
# kvant bench: tables, JSON and refusals. Speed itself is not judged here.
set -euo pipefail
kvant="$KVANT_BIN/kvant"
export KVANT_HOME="$KVANT_TEST_DIR/home"
cd "$KVANT_TEST_DIR"

echo "-- attention: checked against DQREF, median of rounds, repro command"
"$kvant" bench attention --kv 'llama:f16;exact;kv4;k=t3,v=t3' --lengths 256,1024 --layers 2 --repeats 3 --json >attention.json
python3 - <<'PYTHON'
import json, subprocess, shlex, os
j = json.load(open("attention.json"))
rows = {(r["cache"], r["length"]): r for r in j["rows"]}
assert len(rows) == 8 and j["version"] == 1 and j["isa"]
for (cache, length), r in rows.items():
    assert r["seconds"] > 0 and r["ns_per_head_key"] > 0 and r["gb_per_s"] > 0
    assert (0 < r["max_error"] < 0.02) == (cache != "llama:f16"), r
words = shlex.split(j["command"])
again = json.loads(subprocess.check_output([os.environ["KVANT_BIN"] + "/kvant", *words[1:], "--json"]))
assert again["command"] == j["command"]
PYTHON
KVANT_ISA=scalar "$kvant" bench attention --kv kv4 --lengths 256 --layers 1 --repeats 1 --json >scalar.json
python3 -c 'import json; assert json.load(open("scalar.json"))["isa"] == "scalar"'
KVANT_KV='kv3;exact' "$kvant" bench attention --lengths 256 --layers 1 --repeats 1 --json >variable.json
python3 -c 'import json; assert [r["cache"] for r in json.load(open("variable.json"))["rows"]] == ["kv3", "exact"]'
KVANT_KV=kv3 "$kvant" bench attention --kv exact --lengths 256 --layers 1 --repeats 1 --json 2>said.txt >override.json
python3 -c 'import json; assert [r["cache"] for r in json.load(open("override.json"))["rows"]] == ["exact"]'
grep -qx "kvant: KVANT_KV=kv3 is overridden by --kv exact" said.txt
for bench in attention "decode -m nothing-to-load"; do
  touch nothing-to-load
  code=0
  # shellcheck disable=SC2086
  KVANT_KV=kv99 "$kvant" bench $bench >/dev/null 2>refused.txt || code=$?
  [ "$code" -eq 2 ]
  grep -q "^kvant: KVANT_KV: " refused.txt
done
"$kvant" bench attention --kv kv4 --lengths 512 --layers 1 --forks 8 --repeats 1 >table.txt
grep -q '^| kv4 | 512 |' table.txt
code=0
"$kvant" bench attention --kv kv4 --peer llama:f16 --forks 2 --repeats 1 >/dev/null 2>refused.txt || code=$?
[ "$code" -eq 3 ]
grep -q "kvant's caches only" refused.txt

echo "-- decode: filled caches, prefill, JSON"
"$kvant" testmodel --kind shapes --layers 2 --heads 8 --kv-heads 2 --head-dim 128 --weights q8_0 -o q8.gguf
"$kvant" bench decode -m q8.gguf --kv kv4,w=0 --peer llama:f16 --depths 0,768 --rounds 2 --round-tokens 40 --prefill 128 --prefill-rounds 2 --json >decode.json
python3 - <<'PYTHON'
import json
j = json.load(open("decode.json"))
rows = {(r["cache"], r["depth"]): r for r in j["rows"]}
assert set(rows) == {(c, d) for c in ("kv4,w=0", "llama:f16") for d in (0, 768)}
assert all(r["decode_tok_s"] > 0 and r["prefill_tok_s"] > 0 for r in rows.values())
assert 0 < rows["kv4,w=0", 768]["encode_share"] < 1 and rows["llama:f16", 768]["encode_share"] == 0
kv4, f16 = rows["kv4,w=0", 768], rows["llama:f16", 768]
assert kv4["prefill_encode_tok_s"] > kv4["prefill_tok_s"] and f16["prefill_encode_tok_s"] == 0
PYTHON
code=0
"$kvant" testmodel --kind shapes --head-dim 72 --heads 1 --kv-heads 1 --weights q8_0 -o no.gguf 2>refused.txt || code=$?
[ "$code" -eq 2 ]
grep -q "multiple of 32" refused.txt

echo "-- another engine that was not built is said so"
code=0
"$kvant" bench decode -m q8.gguf --kv kv4 --peer ik:q4_0 --depths 0 >/dev/null 2>refused.txt || code=$?
[ "$code" -eq 4 ]
grep -q "./run setup peers" refused.txt

echo "-- bars: names, and one group that needs no model of its own"
code=0
"$kvant" bench bars -m q8.gguf --only fork 2>refused.txt || code=$?
[ "$code" -eq 2 ]
grep -q "nearest is forks" refused.txt
rc=0
"$kvant" bench bars -m q8.gguf --only forks --json >bars.json || rc=$?
RC=$rc python3 - <<'PYTHON'
import json, os
rows = json.load(open("bars.json"))["rows"]
assert len(rows) == 2 and all(r["group"] == "forks" and r["figure"] > 0 and r["bar"] == 1.5 for r in rows), rows
short = [r for r in rows if r["figure"] > r["bar"]]
assert all((r["state"] == "falls short") == (r in short) for r in rows), rows
assert int(os.environ["RC"]) == (8 if short else 0)
PYTHON
echo "bench works"
