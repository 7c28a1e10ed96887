#!/usr/bin/env bash
# What users get wrong: the exit code of docs/cli.md, a message on stderr that names the option (and the nearest legal
# value, where there is one), nothing on stdout.
set -euo pipefail
kvant="$KVANT_BIN/kvant"
cd "$KVANT_TEST_DIR"
failed=0 checks=0

# refuse CODE TEXT ARGUMENTS...: must fail with CODE and say TEXT in its only line.
refuse() {
  local code="$1" text="$2" rc=0
  shift 2
  "$kvant" "$@" >out.txt 2>err.txt </dev/null || rc=$?
  checks=$((checks + 1))
  if [ "$rc" -ne "$code" ] || ! grep -qF -- "$text" err.txt || [ "$(grep -c '^kvant' err.txt)" -gt 1 ] || [ -s out.txt ]; then
    echo "kvant $*: exit $rc (wanted $code), stderr must say '$text' once and stdout nothing:"
    sed 's/^/  /' err.txt out.txt
    failed=$((failed + 1))
  fi
}

echo "some text" >text.txt
echo "not a model" >broken.gguf
: >empty.gguf
model="$KVANT_MODEL"

refuse 2 "SUBCOMMAND"
refuse 2 "'evall' is not a command; nearest is eval" evall
refuse 2 "'--promt' is not an option; nearest is --prompt" run --promt x
refuse 2 "'--kw' is not an option; nearest is --kv" eval -m "$model" -f text.txt --kw kv4
refuse 2 "--model is required" run -p x
refuse 2 "--file is required" eval -m "$model"
refuse 4 "there is no file missing.gguf" run -m missing.gguf -p x
refuse 4 "is a folder" run -m . -p x
refuse 4 "broken.gguf is not a model file" run -m broken.gguf -p x
refuse 4 "broken.gguf is not a GGUF file" eval -m broken.gguf -f text.txt
refuse 4 "empty.gguf is not a GGUF file" plan -m empty.gguf
refuse 2 "--window: 5000 is not in 0 to 4096; nearest is 4096" run -m "$model" -p x --window 5000
refuse 2 "--sinks: -1 is not in 0 to 256; nearest is 0" run -m "$model" -p x --sinks -1
refuse 2 "--threads: 0 is not in 1 to 512; nearest is 1" run -m "$model" -p x -t 0
refuse 2 "--threads: 'two' is not a whole number" run -m "$model" -p x -t two
refuse 2 "--temp: 'hot' is not a number" run -m "$model" -p x --temp hot
refuse 2 "--top-p: 1.5 is not in 0 to 1; nearest is 1" run -m "$model" -p x --top-p 1.5
refuse 2 "--attention: 'fuse' is none of fused, dequant; nearest is fused" run -m "$model" -p x --attention fuse
refuse 2 "--isa: 'neon9'" run -m "$model" -p x --isa neon9
refuse 2 "--limit: 0 is not in 1 to" run -m "$model" -p x --limit 0
refuse 2 "nearest is kv4" run -m "$model" -p x --kv kv44
refuse 2 "scheme 'k=zz,v=t4'" run -m "$model" -p x --kv k=zz,v=t4
refuse 2 "w= takes 0..4096" run -m "$model" -p x --kv kv4,w=9999
refuse 2 "w= is given twice" run -m "$model" -p x --kv kv4,w=9 --window 8
refuse 2 "nearest is q8_0" run -m "$model" -p x --kv llama:q8
refuse 2 "--ctx-size 999999: the model was trained for" run -m "$model" -p x -c 999999
refuse 2 "the prompt is empty" run -m "$model" -f /dev/null
refuse 2 "the prompt is empty" run -m "$model" -p ""
refuse 4 "more than 256 MiB" run -m "$model" -f /dev/zero
refuse 3 "--window: llama:q8_0 is llama.cpp's own cache" run -m "$model" -p x --kv llama:q8_0 --window 5
refuse 2 "is listed twice" eval -m "$model" -f text.txt --kv kv4,kv8,kv4
refuse 2 "--kv: no cache is listed" eval -m "$model" -f text.txt --kv ,
refuse 2 "--tests: 'copies' is none of" eval -m "$model" -f text.txt --tests copies
refuse 2 "--weights: 'f16' is none of f32, native" eval -m "$model" -f text.txt --weights f16
refuse 2 "--max-kl judges kvant's caches" eval -m "$model" -f text.txt --kv llama:q8_0 --max-kl 0.1
refuse 3 "--window is an option of kvant's caches" eval -m "$model" -f text.txt --kv llama:q8_0 --window 64
refuse 3 "--sinks is an option of kvant's caches" eval -m "$model" -f text.txt --kv llama:q8_0,llama:f16 --sinks 4
refuse 2 "--filler /dev/null is empty" eval -m "$model" -f text.txt --filler /dev/null
refuse 2 "are needed: the nearest --ctx-size is" eval -m "$model" -f text.txt --kv kv4 --weights native
refuse 2 "no position lies beyond the exact window + 512; the nearest that works is 642" \
  eval -m "$model" -f "$KVANT_TEXT_DIR/evaluation.txt" --kv kv4 --weights native -c 256 --tests text
refuse 2 "'q4' is not a cache type of llama.cpp; nearest is q4_" plan -m "$model" --kv llama:q4
refuse 3 "--window is an option of kvant's caches" plan -m "$model" --kv llama:q4_0 --window 64
refuse 3 "llama.cpp refuses head size 40" plan --layers 1 --kv-heads 1 --head-dim 40 --kv llama:f16/q4_0
refuse 2 "--layers is needed" plan --head-dim 64
refuse 2 "give one or the other" plan -m "$model" --layers 3
refuse 2 "--head-dim: 20 is not in 32 to 256; nearest is 32" plan --layers 2 --kv-heads 1 --head-dim 20
refuse 2 "--value-dim 36: head sizes are multiples of 8; nearest is 40" \
  plan --layers 2 --kv-heads 1 --head-dim 64 --value-dim 36
refuse 2 "--query-heads 3: not a multiple of --kv-heads 2; nearest is 4" \
  plan --layers 2 --kv-heads 2 --query-heads 3 --head-dim 64
refuse 2 "nearest --ctx-size is 67108864" \
  plan --layers 4096 --kv-heads 1024 --head-dim 256 -c 268435456 --kv kv4
refuse 2 "--head-dim 100: head sizes are multiples of 8; nearest is 104" formats --head-dim 100
refuse 2 "nearest registered name is" formats --explain t9
refuse 2 "--side: 'keys' is none of key, value; nearest is key" formats --explain t4 --side keys
refuse 2 "--kind: 'bias' is none of" testmodel --kind bias -o m.gguf
refuse 2 "--kv-heads 3 does not divide --heads 4; nearest is 2" testmodel --kv-heads 3 -o m.gguf
refuse 4 "cannot be written" testmodel -o /nowhere/m.gguf
refuse 2 "--output: the name of a file is needed" testmodel -o ""
refuse 2 "--tokens 256 is less than one --window of 2048; nearest is 2048" \
  calibrate -m "$model" -f text.txt --tokens 256 -o calibration.gguf
refuse 5 "does not fit in the memory limit of 1048576 bytes" run -m "$model" -p x --limit 1
"$kvant" testmodel --kind shapes --head-dim 36 -o odd.gguf
refuse 3 "head size 36" run -m odd.gguf -p x --strict
"$kvant" testmodel --kind shapes -o small.gguf
refuse 3 "the nearest is 40" plan -m odd.gguf
refuse 5 "do not fit in the memory limit of 4194304 bytes" bench decode -m small.gguf --kv kv4 --depths 4096 --limit 4 \
  --rounds 1 --prefill 0
refuse 4 "small.gguf: not a kvant calibration" run -m small.gguf -p x --recipe small.gguf
python3 - <<'PYTHON'
data = bytearray(open("small.gguf", "rb").read())
middle = len(data) // 8 * 4
data[middle : middle + 4096] = b"\x00\x00\xc0\x7f" * 1024
open("nan.gguf", "wb").write(data)
PYTHON
refuse 9 "NaN or Inf in" run -m nan.gguf -p "hello world"
refuse 9 "NaN or Inf in" calibrate -m nan.gguf -f "$KVANT_TEXT_DIR/evaluation.txt" --tokens 2048 -o nan-calibration.gguf
head -c 100000 small.gguf >cut.gguf
refuse 4 "ends early" plan -m cut.gguf

# What is read is not written.
cp small.gguf copy.gguf
refuse 2 "--output copy.gguf is the file of --model" testmodel --kind planted -m copy.gguf -o copy.gguf
refuse 2 "--output ./copy.gguf is the file of --model" calibrate -m copy.gguf -f text.txt -o ./copy.gguf
refuse 2 "--output text.txt is the file of --file" calibrate -m copy.gguf -f text.txt -o text.txt
cmp small.gguf copy.gguf || failed=$((failed + 1))

# Output that goes nowhere is an error; names need not be UTF-8.
checks=$((checks + 3))
code=0
"$kvant" formats >/dev/full 2>err.txt || code=$?
if [ "$code" -ne 4 ] || ! grep -q "output cannot be written" err.txt; then
  echo "formats to a full disk: exit $code"
  failed=$((failed + 1))
fi
python3 - <<'PYTHON'
data = open("small.gguf", "rb").read()
open("name.gguf", "wb").write(data.replace(b"random weights", b"\xffandom weights", 1))
PYTHON
checks=$((checks + 1))
"$kvant" eval -m name.gguf -f "$KVANT_TEXT_DIR/evaluation.txt" --weights native --kv kv4 --tests text -c 1024 --no-speed \
  --json | python3 -m json.tool >/dev/null || failed=$((failed + 1))
cp small.gguf $'n\xff.gguf'
"$kvant" plan -m $'n\xff.gguf' --json | python3 -m json.tool >/dev/null || failed=$((failed + 1))
KVANT_ATTENTION=dequant "$kvant" env --attention fused --recipe none >env.txt
if ! grep -qx "export KVANT_RECIPE=none" env.txt || ! grep -qx "export KVANT_ATTENTION=fused" env.txt; then
  echo "env leaves out options:"
  cat env.txt
  failed=$((failed + 1))
fi
export KVANT_KV=kv99
refuse 2 "KVANT_KV: " env
refuse 2 "nearest is kv" env
refuse 2 "KVANT_KV: " plan -m "$model"
refuse 2 "KVANT_KV: " eval -m "$model" -f text.txt
unset KVANT_KV
export KVANT_STRICT=maybe
refuse 2 "KVANT_STRICT=maybe" run -m "$model" -p x
unset KVANT_STRICT
export KVANT_ATENTION=fused
refuse 2 "nearest is KVANT_ATTENTION" env
refuse 2 "nearest is KVANT_ATTENTION" plan -m "$model"
unset KVANT_ATENTION

echo "$checks bad inputs, $failed handled wrongly"
[ "$failed" -eq 0 ] && [ "$checks" -ge 25 ]
