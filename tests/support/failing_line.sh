# Every script of tests/e2e starts with this file (BASH_ENV, tests/CMakeLists.txt): a command that ends the script, or
# one of its subshells, says where.
unset BASH_ENV  # the programs and scripts that it starts are not tests
set -E
trap 'echo "$0: line $LINENO: exit $?: $BASH_COMMAND" >&2' ERR
