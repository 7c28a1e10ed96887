// Attention kernels for AVX2 with FMA and F16C. Compiled with those flags and only called when the CPU has
// them.
#if defined(__AVX2__)
#define HWY_DISABLED_TARGETS (HWY_AVX3 | HWY_AVX3_DL)
#define KVANT_TARGET avx2
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
static_assert(HWY_TARGET == HWY_AVX2);

namespace kvant::simd {
const AttentionKernels* avx2_attention_kernels() { return &avx2::kAttentionKernels; }
}  // namespace kvant::simd
#else
#include "simd/attention.h"

namespace kvant::simd {
const AttentionKernels* avx2_attention_kernels() { return nullptr; }
}  // namespace kvant::simd
#endif
