#!/usr/bin/env bash
# What holds for every script: a command that fails is named with its line, and no pipe ends early.
set -euo pipefail
cd "$KVANT_TEST_DIR"
# shellcheck source=tools/lib.sh
source "$KVANT_ROOT/tools/lib.sh"
# shellcheck source=tools/checks.sh
source "$KVANT_ROOT/tools/checks.sh"

if ! trap -p ERR | grep LINENO >/dev/null; then
  echo "this script was started without tests/support/failing_line.sh"
  exit 1
fi

cat >fails.sh <<'SCRIPT'
set -euo pipefail
count() { [ "$1" -eq 3 ]; }
if false; then :; fi
grep x /dev/null || true
count 3

count 4
echo "not reached"
SCRIPT
code=0
BASH_ENV="$KVANT_ROOT/tests/support/failing_line.sh" bash fails.sh >said.txt 2>&1 || code=$?
[ "$code" -eq 1 ]
cat >want.txt <<'SAID'
fails.sh: line 2: exit 1: [ "$1" -eq 3 ]
SAID
cmp want.txt said.txt
tr @ '|' >pipe.sh <<'SCRIPT'
set -euo pipefail
yes @ head -n 1 >/dev/null
SCRIPT
code=0
BASH_ENV="$KVANT_ROOT/tests/support/failing_line.sh" bash pipe.sh >said.txt 2>&1 || code=$?
[ "$code" -eq 141 ]
grep -F "pipe.sh: line 2: exit 141: " said.txt >/dev/null

tr @ '|' >early.sh <<'SCRIPT'
program @ grep -q x
program --all 2>&1 @ grep -Eqx "a|b" || exit 1
program @ grep -i -q x
program @ grep --quiet x
program @ sort @ head -n 1
program @
  grep -q x
program @& grep -m 1 x
SCRIPT
cat >late.sh <<'SCRIPT'
# program | grep -q x
program | grep x >/dev/null
program || grep -q x file
grep -q x file || grep -q y file && head -n 1 file
head -c 10 file | program
program | grep -E -- "-q|-m" | tail -n 1
grep -q x <<<"$(program)"
SCRIPT
early_readers early.sh >found.txt || true
if [ "$(cut -d: -f2 found.txt | tr '\n' ' ')" != "1 2 3 4 5 7 8 " ] || early_readers early.sh >/dev/null; then
  echo "pipes that end early were not all found:"
  cat found.txt
  exit 1
fi
early_readers late.sh
early_readers "$KVANT_ROOT"/run "$KVANT_ROOT"/tools/*.sh "$KVANT_ROOT"/tests/*/*.sh
echo "scripts name the line that failed and read their pipes to the end"
