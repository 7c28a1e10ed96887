# Every relative link in the documents leads to a file or folder of the tree.
set -euo pipefail
cd "$KVANT_ROOT"
checked=0 broken=0
while IFS=: read -r page link; do
  target="${link#](}"
  target="${target%)}"
  target="${target%%#*}"
  case "$target" in "" | http://* | https://*) continue ;; esac
  checked=$((checked + 1))
  [ -e "$(dirname "$page")/$target" ] || { echo "$page: $target does not exist"; broken=$((broken + 1)); }
done < <(grep -roE --include='*.md' --exclude-dir='build*' '\]\([^) ]+\)' .)
echo "$checked links, $broken broken"
[ "$checked" -gt 0 ] && [ "$broken" -eq 0 ]
