# Configuring, building, testing, benchmarking.

# configure DIR CMAKE-ARGUMENTS...: cheap when nothing changed; CMake keeps its own answers.
configure() {
  local dir="$1"
  shift
  cmake -S "$KVANT_ROOT" -B "$dir" -G Ninja \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)" "$@"
}

configure_main() {
  configure "$KVANT_BUILD" -DCMAKE_BUILD_TYPE=Release \
    -DKVANT_LLAMA_SOURCE="$(llama_source_dir)" -DKVANT_LLAMA_BUILD="$(llama_build_dir)" \
    -DKVANT_MODEL="$(model_file)" -DKVANT_TEXT_DIR="$KVANT_HOME/text"
}

build_main() {
  step "configure kvant" "$KVANT_BUILD/log-configure.txt" configure_main
  step "build kvant: $*" "$KVANT_BUILD/log-build.txt" ninja -C "$KVANT_BUILD" -j "$JOBS" "$@"
}

verb_build() {
  setup_base
  build_main kvant_programs
  say "built: $KVANT_BUILD/bin/kvant and $KVANT_BUILD/bin/libggml-kvant.so"
}

# report_counts JUNIT: closes with "N passed, N failed" (and skipped ones, if any); fails unless something passed
# and nothing failed.
report_counts() {
  python3 - "$1" <<'PYTHON'
import sys, xml.etree.ElementTree as ET
suite = ET.parse(sys.argv[1]).getroot()
cases = [case.get("status") for case in suite.iter("testcase")]
failed = sum(status == "fail" for status in cases)
passed = sum(status == "run" for status in cases)
skipped = len(cases) - failed - passed
print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
sys.exit(0 if passed and not failed else 1)
PYTHON
}

verb_test() {
  # shellcheck disable=SC2086
  with_setup_lock require_packages $PACKAGES_TEST
  setup_tools
  build_main all
  local junit="$KVANT_BUILD/tests.xml"
  rm -f "$junit"
  # ctest's own exit code is judged through its report, so that the closing line is printed in any case.
  ctest --test-dir "$KVANT_BUILD" --output-on-failure -j "$JOBS" --output-junit "$junit" "$@" || true
  [ -f "$junit" ] || die "ctest wrote no report; no test ran"
  report_counts "$junit"
}

verb_bench() {
  setup_base
  build_main kvant_bench
  "$KVANT_BUILD/bin/kvant_bench" "$@"
}
