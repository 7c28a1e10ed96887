# Every command that README.md shows works as written. Each ```sh block runs as one script from the root of the tree.
# Left out are the commands that are tests themselves or fetch: ./run demo and ./run test.
set -euo pipefail
cd "$KVANT_ROOT"
[ -x "$KVANT_BIN/kvant" ] || { echo "no build/bin/kvant"; exit 1; }
# README says build/bin; a build elsewhere is tested through a link.
work="$KVANT_TEST_DIR"
for entry in * .ci; do [ "$entry" = build ] || ln -s "$KVANT_ROOT/$entry" "$work/$entry"; done
ln -s "$KVANT_BUILD" "$work/build"

awk -v dir="$work" '
  /^```sh *$/ { inside = 1; block++; next }
  /^```/      { inside = 0 }
  inside      { print > (dir "/block-" block ".sh") }' README.md

# A command continued with "\" belongs to its first line.
is_left_out='^\./run (demo|test)( |$)'
ran=0 failed=0
for script in "$work"/block-*.sh; do
  grep -vE "$is_left_out" "$script" >"$script.run" || true
  grep -qE '^[^#[:space:]]' "$script.run" || continue
  ran=$((ran + 1))
  if ! (cd "$work" && bash -euo pipefail "$script.run") >"$script.log" 2>&1 </dev/null; then
    failed=$((failed + 1))
    echo "--- this block of README.md fails:"
    cat "$script.run"
    echo "--- with:"
    tail -n 30 "$script.log"
  fi
done
echo "$ran blocks ran, $failed failed"
[ "$ran" -gt 0 ] && [ "$failed" -eq 0 ]
