# check.sh COMPILER CASE INCLUDE-DIR: the case compiles as it is; with -DKVANT_MUST_FAIL the compiler refuses it with
# a message that matches the case's "// expect: REGEX".
set -euo pipefail
compiler="$1" case_file="$2" include_dir="$3"

expected="$(sed -n 's|^// expect: ||p' "$case_file")"
[ -n "$expected" ] || { echo "$case_file has no '// expect: ' line"; exit 1; }
grep -q KVANT_MUST_FAIL "$case_file" || { echo "$case_file does not use KVANT_MUST_FAIL"; exit 1; }

compile() { "$compiler" -std=c++20 -Wall -Wextra -Werror -fsyntax-only -I "$include_dir" "$@" "$case_file"; }

compile || { echo "the case must compile without KVANT_MUST_FAIL"; exit 1; }
if messages="$(compile -DKVANT_MUST_FAIL 2>&1)"; then
  echo "the case must be refused with KVANT_MUST_FAIL, but compiles"
  exit 1
fi
grep -qE -- "$expected" <<<"$messages" || { echo "refused for another reason than '$expected':"; echo "$messages"; exit 1; }
