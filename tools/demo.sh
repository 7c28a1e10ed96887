# The demo: a real model, one table.

# demo_table: prints the table that README.md shows.
demo_table() {
  local kvant="$KVANT_BUILD/bin/kvant"
  # Most of the time is llama.cpp's: attention on its quantized caches. Short enough for six minutes on two cores.
  "$kvant" eval -m "$(model_file)" -f "$(text_file evaluation)" --filler "$(text_file calibration)" -t "$JOBS" \
    -c 1024 --speed-depth 1024 \
    --kv 'llama:f16,llama:q8_0,llama:q5_0,llama:q4_0,exact,kv8,kv4'
}

# Replaces what stands between README.md's two demo-table marks by the file.
put_table_into_readme() {
  python3 - "$KVANT_ROOT/README.md" "$1" <<'PYTHON'
import sys
readme_path, table_path = sys.argv[1:]
begin, end = "<!-- demo-table -->", "<!-- /demo-table -->"
readme = open(readme_path, encoding="utf-8").read()
head, rest = readme.split(begin)
_, tail = rest.split(end)
table = open(table_path, encoding="utf-8").read().strip("\n")
open(readme_path, "w", encoding="utf-8").write(f"{head}{begin}\n```\n{table}\n```\n{end}{tail}")
PYTHON
}

verb_demo() {
  local start table="$KVANT_BUILD/demo-table.txt"
  start=$(date +%s)
  case "${1:-}" in "" | readme) ;; *) die "demo: '$1' is not known; use readme or nothing" ;; esac
  setup_base
  build_main kvant_programs
  demo_table | tee "$table"
  [ "${1:-}" != readme ] || put_table_into_readme "$table"
  say "demo took $(($(date +%s) - start)) s in all"
}
