# The library builds without ggml, passes its fast tests and installs; a program outside the tree finds the package,
# compiles against it and runs.
set -euo pipefail
build="$KVANT_TEST_DIR/build" prefix="$KVANT_TEST_DIR/prefix" consumer="$KVANT_TEST_DIR/consumer"
launcher="$(command -v ccache || true)"

cmake -S "$KVANT_ROOT" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVANT_CORE_ONLY=ON -DKVANT_BUILD_BENCH=OFF \
  -DCMAKE_CXX_COMPILER="$KVANT_CXX" -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" >/dev/null
if grep -qiE 'ggml|llama' "$build/build.ninja"; then
  echo "core's build mentions ggml or llama:"
  grep -m 5 -iE 'ggml|llama' "$build/build.ninja"
  exit 1
fi
ninja -C "$build" >"$KVANT_TEST_DIR/build.log" || { tail -n 40 "$KVANT_TEST_DIR/build.log"; exit 1; }
ctest --test-dir "$build" --output-on-failure --no-tests=error -L '^(unit|golden)$' >"$KVANT_TEST_DIR/ctest.log" ||
  { tail -n 40 "$KVANT_TEST_DIR/ctest.log"; exit 1; }

cmake --install "$build" --prefix "$prefix" --component kvant_core >/dev/null
cmake -S "$KVANT_ROOT/tests/e2e/install" -B "$consumer" -G Ninja -DCMAKE_CXX_COMPILER="$KVANT_CXX" \
  -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
grep -q "kvant_DIR:PATH=$prefix" "$consumer/CMakeCache.txt" || { echo "another kvant than the installed one was found"; exit 1; }
ninja -C "$consumer" >"$KVANT_TEST_DIR/consumer.log" || { cat "$KVANT_TEST_DIR/consumer.log"; exit 1; }
output="$("$consumer/consumer")"
echo "$output"
grep -q '^ok$' <<<"$output"
