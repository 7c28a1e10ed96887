#!/usr/bin/env bash
# The KVANT device in process (kvant_backend_test) and in stock llama.cpp programs (module), on a real model.
set -euo pipefail

# Threads that wait leave the cores to others; results do not depend on it.
export OMP_WAIT_POLICY=passive
module="$KVANT_BIN/libggml-kvant.so"
home="${KVANT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/kvant}"
text="$KVANT_TEXT_DIR/evaluation.txt"
log="$KVANT_TEST_DIR/log.txt"

fail() {
  echo "FAILED: $*" >&2
  [ ! -f "$log" ] || tail -n 30 "$log" >&2
  exit 1
}

# With f32 weights: quantized ones round activations to 8 bits, and that noise hides the cache.
f32_of() {
  local target
  target="$home/f32/backend-$(basename "$1" .gguf)-$(stat -c %s "$1").gguf"
  if [ ! -f "$target" ]; then
    mkdir -p "$home/f32"
    "$KVANT_LLAMA_BIN/llama-quantize" --allow-requantize "$1" "$target.$$" f32 >"$log" 2>&1 || fail "llama-quantize"
    mv "$target.$$" "$target"
  fi
  echo "$target"
}

# stock SCHEME PROGRAM ARGUMENTS...: an unchanged llama.cpp program on kvant's cache; output in $log.
stock() {
  local scheme="$1" program="$2"
  shift 2
  GGML_BACKEND_PATH="$module" KVANT_KV="$scheme" "$KVANT_LLAMA_BIN/$program" --device KVANT "$@" >"$log" 2>&1 </dev/null
}

said() { grep -qF -- "$1" "$log" || fail "expected to read: $1"; }

# Mean KL of SCHEME against llama.cpp's f16 cache over two windows of 512 tokens; the largest allowed is MAXIMUM.
compare_kl() {
  local model="$1" scheme="$2" maximum="$3" base="$KVANT_TEST_DIR/base.kld" mean
  if [ ! -f "$base" ]; then
    "$KVANT_LLAMA_BIN/llama-perplexity" -m "$model" -f "$text" -c 512 -b 512 --chunks 2 --kl-divergence-base "$base" \
      >"$log" 2>&1 </dev/null || fail "llama-perplexity with llama.cpp's cache"
  fi
  stock "$scheme" llama-perplexity -m "$model" -f "$text" -c 512 -b 512 --chunks 2 --kl-divergence-base "$base" \
    --kl-divergence || fail "llama-perplexity, $scheme"
  mean="$(awk '/^Mean +KLD:/ { print $3 }' "$log")"
  awk -v kl="$mean" -v max="$maximum" 'BEGIN { exit !(kl != "" && kl <= max && kl >= -max) }' ||
    fail "$scheme: mean KL '$mean', at most $maximum"
  echo "$(basename "$model"), $scheme: mean KL $mean"
}

model32="$(f32_of "$KVANT_MODEL")"
"$KVANT_BIN/kvant_backend_test" "$model32" "$text"

compare_kl "$model32" exact 0.00001
said "kvant: exact, 16.00 bits per value"
said "0.0 % of key reads from packed tiles"
compare_kl "$model32" kv4,w=64 0.05
said "window 64, sinks 16"
grep -E 'kvant: 512 slots in .*, [1-9][0-9.]* % of key reads from packed tiles' "$log" >/dev/null ||
  fail "kv4 read nothing from packed tiles"

gemma="${KVANT_GEMMA:-}"
if [ -n "$gemma" ] && [ -f "$gemma" ]; then
  rm -f "$KVANT_TEST_DIR/base.kld"
  gemma32="$(f32_of "$gemma")"
  "$KVANT_BIN/kvant_backend_test" "$gemma32" "$text" greedy
  compare_kl "$gemma32" exact 0.00001
  said "18 layers"
else
  echo "Gemma 3 is not there (./run setup gemma): its window layers and head size 256 are not tested here"
fi

stock kv4 llama-bench -m "$KVANT_MODEL" -p 128 -n 16 -r 1 -fa 1 || fail "llama-bench"
said "tg16"
KVANT_FOO=1 stock kv4 llama-completion -m "$KVANT_MODEL" -p "The capital of France is" -n 8 -no-cnv --temp 0 ||
  fail "llama-completion"
said "Paris"
[ "$(grep -c "kvant: KVANT_FOO: not a variable of kvant, ignored; nearest is KVANT_KV" "$log")" -eq 1 ] ||
  fail "KVANT_FOO must be said once"
LLAMA_ARG_DEVICE=KVANT GGML_BACKEND_PATH="$module" KVANT_KV=kv8 KVANT_QUIET=1 "$KVANT_LLAMA_BIN/llama-completion" \
  -m "$KVANT_MODEL" -p "The capital of France is" -n 8 -no-cnv --temp 0 >"$log" 2>&1 </dev/null || fail "LLAMA_ARG_DEVICE"
said "Paris"
grep -q "kvant: " "$log" && fail "KVANT_QUIET=1 was not quiet"
stock kv4 llama-batched-bench -m "$KVANT_MODEL" -c 2048 -npp 64 -ntg 8 -npl 1,4 -fa on || fail "llama-batched-bench"
said "kvant: 288 slots"

stock kv44 llama-completion -m "$KVANT_MODEL" -p x -n 1 -no-cnv && fail "KVANT_KV=kv44 was accepted"
said "kvant: KVANT_KV=kv44"
said "nearest is kv4"
said "invalid device: KVANT"
stock kv4 llama-completion -m "$KVANT_MODEL" -p x -n 1 -no-cnv -fa off && fail "-fa off was accepted"
said "use -fa on"
stock kv4 llama-completion -m "$KVANT_MODEL" -p x -n 1 -no-cnv -ctk q8_0 && fail "-ctk q8_0 was accepted"
said "-ctk f16"
KVANT_ATENTION=fused stock kv4 llama-completion -m "$KVANT_MODEL" -p x -n 1 -no-cnv && fail "KVANT_ATENTION was ignored"
said "nearest is KVANT_ATTENTION"
KVANT_ATTENTION=dequant KVANT_ISA=scalar stock kv4 llama-completion -m "$KVANT_MODEL" -p "The capital of France is" \
  -n 4 -no-cnv --temp 0 || fail "KVANT_ISA=scalar"
said "isa scalar"
echo "stock programs: perplexity, bench, completion, batched-bench; refusals say what to do"
