# Lint, sanitizers, fuzzing, coverage, other processors.

source_files() {
  git -C "$KVANT_ROOT" ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cc' '*.inc'
}

script_files() {
  git -C "$KVANT_ROOT" ls-files --cached --others --exclude-standard -- run .ci/run '*.sh'
}

verb_format() {
  # shellcheck disable=SC2086
  with_setup_lock require_packages $PACKAGES_LINT
  source_files | xargs -r clang-format -i
}

# run_tidy CLANG-TIDY-ARGUMENTS...: over the files of stdin; findings are errors.
run_tidy() {
  xargs -r -n 1 -P "$JOBS" clang-tidy --quiet -p "$KVANT_BUILD" --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option "$@"
}

# early_readers FILES...: prints the pipes of shell scripts whose reader stops before the end of its input; fails when
# there is one. The program before it may then die of SIGPIPE, and with pipefail the pipe fails, now and then.
early_readers() {
  awk '
    FNR == 1 { joined = "" }
    /^[ \t]*#/ { next }
    /(\||\\)[ \t]*$/ { joined = joined $0 " "; next }
    { line = joined $0; joined = "" }
    line ~ /(^|[^|])\|&?[ \t]*(head|[ef]?grep([ \t]+-[^ \t]*)*[ \t]+(-[A-Za-z]*[qm]|--quiet|--silent|--max-count))/ {
      print FILENAME ":" FNR ":" $0
      found = 1
    }
    END { exit found }' "$@"
}

verb_lint() {
  # shellcheck disable=SC2086
  with_setup_lock require_packages $PACKAGES_LINT
  setup_base
  step "configure kvant" "$KVANT_BUILD/log-configure.txt" configure_main
  local scripts
  mapfile -t scripts < <(script_files)
  shellcheck --shell=bash --external-sources "${scripts[@]}"
  early_readers "${scripts[@]}" >&2 ||
    die "these pipes end early: let grep read to the end (>/dev/null instead of -q), or read a file"
  source_files | xargs -r clang-format --dry-run -Werror
  local kernels='^core/src/simd/(attention|encode)_(hwy128|avx2|avx512)\.cpp$'
  tidy_files() { source_files | grep -E '^(core|adapters|eval|apps)/.*\.cpp$'; }
  # Left out for kernels: the path-sensitive checks, which take minutes a file on vector code that templates inline
  # and unroll; and definitions in headers, since an -inl.h is the body of one source file per instruction set, in a
  # namespace of its own each time.
  tidy_files | grep -E "$kernels" | run_tidy --checks='-clang-analyzer-*,-misc-definitions-in-headers'
  tidy_files | grep -vE "$kernels" | run_tidy
  say "lint: no findings"
}

core_build() {
  local dir="$1"
  shift
  step "configure $(basename "$dir")" "$dir/log-configure.txt" configure "$dir" -DKVANT_CORE_ONLY=ON -DKVANT_BUILD_BENCH=OFF "$@"
  step "build $(basename "$dir")" "$dir/log-build.txt" ninja -C "$dir" -j "$JOBS"
}

# verb_sanitize NAME SANITIZERS: core and its tests; an error of a sanitizer ends the test that it happens in.
verb_sanitize() {
  local dir="$KVANT_ROOT/build-$1"
  # shellcheck disable=SC2086
  with_setup_lock require_packages $PACKAGES_BUILD
  core_build "$dir" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVANT_SANITIZE="$2"
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ASAN_OPTIONS=detect_stack_use_after_return=1 \
    ctest --test-dir "$dir" --output-on-failure --no-tests=error -j "$JOBS"
}

verb_fuzz() {
  local seconds="${1:-30}" dir="$KVANT_ROOT/build-fuzz" target name corpus found=0
  # shellcheck disable=SC2086
  with_setup_lock require_packages $PACKAGES_BUILD $PACKAGES_FUZZ
  core_build "$dir" -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVANT_FUZZ=ON \
    -DKVANT_BUILD_TESTS=OFF
  for target in "$dir"/bin/fuzz_*; do
    [ -x "$target" ] || continue
    found=1
    name="$(basename "$target")"
    corpus="$KVANT_HOME/fuzz/$name"
    mkdir -p "$corpus"
    say "$name for $seconds s"
    # New inputs go to the cache folder; the committed corpus is read only.
    local seeds="$KVANT_ROOT/fuzz/corpus/${name#fuzz_}"
    [ -d "$seeds" ] || seeds=""
    "$target" -max_total_time="$seconds" -print_final_stats=1 "$corpus" ${seeds:+"$seeds"}
  done
  [ "$found" -eq 1 ] || die "fuzz: no target was built"
}

verb_coverage() {
  local dir="$KVANT_ROOT/build-coverage"
  # shellcheck disable=SC2086
  with_setup_lock require_packages $PACKAGES_BUILD $PACKAGES_COVERAGE
  core_build "$dir" -DCMAKE_BUILD_TYPE=Debug -DKVANT_COVERAGE=ON
  find "$dir" -name '*.gcda' -delete
  ctest --test-dir "$dir" --output-on-failure --no-tests=error -j "$JOBS"
  # The kernels of single instruction sets are left out: tests hold them to the scalar code bit for bit, and which of
  # them run depends on the machine.
  gcovr --root "$KVANT_ROOT" --object-directory "$dir" --filter 'core/' --exclude '.*(avx|hwy128|x86|-inl\.h).*' \
    --exclude-throw-branches --gcov-ignore-parse-errors --print-summary --fail-under-line 90 "$dir/core"
}

# Core for 64-bit Arm under qemu: the kernels there are those of hwy128 in NEON. Without arguments the tests of kernels,
# layouts and transforms, since qemu takes fifty times as long; no property tests, whose library Debian has for the
# machine's own architecture alone.
verb_neon() {
  [ $# -gt 0 ] || set -- -R '^golden|Isa/|Attention(Paths|Skip|Counters)|LiveMask|Transform|TileLayout|PackBand|SlotCache|Half'
  local dir="$KVANT_ROOT/build-neon" toolchain="$KVANT_ROOT/cmake/aarch64.cmake"
  # shellcheck disable=SC2086
  with_setup_lock require_packages $PACKAGES_BUILD $PACKAGES_NEON
  mkdir -p "$dir/gtest"
  step "configure GoogleTest" "$dir/log-gtest.txt" cmake -S /usr/src/googletest -B "$dir/gtest" -G Ninja \
    -DCMAKE_TOOLCHAIN_FILE="$toolchain" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$dir/prefix" \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)"
  step "build GoogleTest" "$dir/log-gtest.txt" ninja -C "$dir/gtest" -j "$JOBS" install
  core_build "$dir" -DCMAKE_TOOLCHAIN_FILE="$toolchain" -DCMAKE_PREFIX_PATH="$dir/prefix" -DCMAKE_BUILD_TYPE=Release
  ctest --test-dir "$dir" --output-on-failure --no-tests=error -j "$JOBS" "$@"
}
