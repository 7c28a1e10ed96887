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
    -DKVANT_MODEL="$(model_file)" -DKVANT_GEMMA="$(gemma_file)" -DKVANT_TEXT_DIR="$KVANT_HOME/text"
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

# report_counts JUNIT: closes with "N passed, N failed" (and ", N skipped", if any); fails unless something passed
# and nothing failed. A test that did not run counts as failed unless it said itself that it skips.
report_counts() {
  python3 - "$1" <<'PYTHON'
import sys, xml.etree.ElementTree as ET
def outcome(case):
    if case.get("status") == "run":
        return "passed"
    note = case.find("skipped")
    return "skipped" if note is not None and note.get("message", "").startswith("SKIP_") else "failed"
outcomes = [outcome(case) for case in ET.parse(sys.argv[1]).getroot().iter("testcase")]
passed, failed, skipped = (outcomes.count(name) for name in ("passed", "failed", "skipped"))
print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
sys.exit(0 if passed and not failed else 1)
PYTHON
}

verb_test() {
  # shellcheck disable=SC2086
  with_setup_lock require_packages $PACKAGES_TEST
  setup_tools
  build_main all
  local junit="$KVANT_BUILD/tests.xml" rc=0
  rm -f "$junit"
  ctest --test-dir "$KVANT_BUILD" --output-on-failure --no-tests=error -j "$JOBS" --output-junit "$junit" "$@" || rc=$?
  [ -f "$junit" ] || die "ctest wrote no report: interrupted, or no test ran"
  # The counts close the output, whatever ctest says; either of the two can fail the run.
  report_counts "$junit" && [ "$rc" -eq 0 ]
}

# bench_quality [ladder|ablation] [OPTIONS]: the tables of docs/quality.md. Hours on two cores; answers are kept.
bench_quality() {
  local kvant="$KVANT_BUILD/bin/kvant" part="${1:-ladder}" gemma results="$KVANT_HOME/quality" models
  [ $# -eq 0 ] || shift
  case "$part" in
    ladder)
      models=(--model "SmolLM2=$(model_file)")
      gemma="$(gemma_file)"
      [ ! -f "$gemma" ] || models+=(--model "Gemma=$gemma")
      python3 "$KVANT_ROOT/bench/quality.py" --kvant "$kvant" "${models[@]}" --text "manual=$(text_file evaluation)" \
        --text "code=$(text_file code)" --filler "$(text_file calibration)" --results "$results" "$@" ;;
    ablation)
      python3 "$KVANT_ROOT/bench/ablation.py" --kvant "$kvant" -m "$(model_file)" --name SmolLM2 \
        -f "$(text_file evaluation)" --filler "$(text_file calibration)" --results "$results" "$@" ;;
    *) die "bench quality: '$part' is not known; use ladder or ablation" ;;
  esac
}

verb_bench() {
  setup_base
  case "${1:-}" in
    attention | decode)
      build_main kvant_programs
      "$KVANT_BUILD/bin/kvant" bench "$@" ;;
    bars)
      build_main kvant_programs
      # The tool's exit code tells bars that are not met from other failures; here both are 1.
      "$KVANT_BUILD/bin/kvant" bench bars -m "$(model_file)" "${@:2}" || exit 1 ;;
    quality)
      build_main kvant_programs
      bench_quality "${@:2}" ;;
    *)
      build_main kvant_bench
      "$KVANT_BUILD/bin/kvant_bench" "$@" ;;
  esac
}
