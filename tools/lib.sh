# Shared helpers: messages go to stderr, so that a verb's own output stays clean.

die() {
  printf 'run: %s\n' "$*" >&2
  exit 1
}

say() { printf '%s\n' "$*" >&2; }

# step TITLE LOG COMMAND...: runs the command with its output in LOG, prints how long it took,
# and on failure the end of the log.
step() {
  local title="$1" log="$2" start rc=0
  shift 2
  start=$(date +%s)
  mkdir -p "$(dirname "$log")"
  printf '%-58s' "$title ..." >&2
  # Not "if ...": inside a condition bash would ignore set -e in the command.
  set +e
  (set -e; "$@") >"$log" 2>&1 </dev/null
  rc=$?
  set -e
  if [ "$rc" -ne 0 ]; then
    printf 'failed (exit %d)\n' "$rc" >&2
    tail -n 40 "$log" >&2
    die "$title failed; the whole log: $log"
  fi
  printf '%4d s\n' "$(($(date +%s) - start))" >&2
}

# verify_sha256 FILE: stops unless the file has the hash that tools/pins.sha256 gives for its name.
verify_sha256() {
  local file="$1" name want have
  name="$(basename "$file")"
  want="$(awk -v n="$name" '$2 == n { print $1 }' "$KVANT_ROOT/tools/pins.sha256")"
  [ -n "$want" ] || die "$name: no pinned sha256 in tools/pins.sha256; not used"
  have="$(sha256sum "$file" | cut -d' ' -f1)"
  if [ "$want" != "$have" ]; then
    rm -f "$file"
    die "$name: sha256 is $have, pinned is $want; the download was removed and not used"
  fi
}
