# A download whose bytes are not the pinned ones is refused with its name and both hashes, and removed.
set -euo pipefail
cd "$KVANT_ROOT"
source tools/lib.sh
file="$KVANT_TEST_DIR/$(awk 'NR == 1 { print $2 }' tools/pins.sha256)"
echo "not the package" >"$file"
changed="$(sha256sum "$file" | cut -d' ' -f1)"
pinned="$(awk 'NR == 1 { print $1 }' tools/pins.sha256)"

if message="$( (verify_sha256 "$file") 2>&1)"; then
  echo "a changed download was accepted"
  exit 1
fi
for part in "$(basename "$file")" "$changed" "$pinned"; do
  grep -qF "$part" <<<"$message" || { echo "the message lacks $part: $message"; exit 1; }
done
[ ! -e "$file" ] || { echo "the changed download is still there"; exit 1; }

unknown="$KVANT_TEST_DIR/unknown.tar.gz"
echo x >"$unknown"
if (verify_sha256 "$unknown") 2>/dev/null; then
  echo "a download without a pin was accepted"
  exit 1
fi
