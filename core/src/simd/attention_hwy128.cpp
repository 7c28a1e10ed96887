// Attention kernels in 128-bit Highway vectors, without intrinsics of any one ISA. On x86-64 this file is
// compiled for SSSE3, the least target that Highway has there.
#include "hwy/detect_compiler_arch.h"
#if HWY_ARCH_ARM_A64 || defined(__SSSE3__)
#define HWY_DISABLED_TARGETS (HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL)
#define KVANT_TARGET hwy128
#include "simd/attention-inl.h"
#include "simd/attention_dot-inl.h"
#include "simd/attention_prepare-inl.h"
#include "simd/attention_prepare_fold-inl.h"
#include "simd/attention_pv-inl.h"
#include "simd/attention_pv_tiles-inl.h"
#include "simd/attention_qk-inl.h"
#include "simd/attention_rows-inl.h"
#include "simd/attention_softmax-inl.h"
#include "simd/attention_table-inl.h"
static_assert(HWY_MAX_BYTES == 16 && !HWY_HAVE_SCALABLE);

namespace kvant::simd {
const AttentionKernels* hwy128_attention_kernels() { return &hwy128::kAttentionKernels; }
}  // namespace kvant::simd
#else
#include "simd/attention.h"

namespace kvant::simd {
const AttentionKernels* hwy128_attention_kernels() { return nullptr; }
}  // namespace kvant::simd
#endif
