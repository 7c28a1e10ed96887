#!/usr/bin/env bash
# Object files that are compiled for more than the baseline ISA may define no inline function: the linker keeps
# one copy of it for the whole program, and if that copy uses AVX-512 the program dies on other CPUs.
set -euo pipefail
objects=$(find "$KVANT_BUILD/core" -name 'attention_avx*.o' -o -name 'encode_avx*.o' -o -name 'attention_hwy*.o')
[ -n "$objects" ] || { echo "no ISA objects under $KVANT_BUILD/core"; exit 1; }
status=0
for object in $objects; do
  weak=$(nm -C --defined-only "$object" | grep -E ' [WV] ' || true)
  if [ -n "$weak" ]; then
    echo "$object defines:"
    echo "$weak"
    status=1
  fi
done
exit $status
