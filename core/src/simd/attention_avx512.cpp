// Attention kernels for AVX-512 with VNNI. Compiled with that ISA's flags and only called when the CPU has
// it.
#if defined(__AVX512VNNI__)
// Highway's AVX3_DL target may encode vpdpbusd as AVX-VNNI, which not every AVX-512 CPU has.
#define HWY_DISABLED_TARGETS HWY_AVX3_DL
#define KVANT_TARGET avx512vnni
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
static_assert(HWY_TARGET == HWY_AVX3);

namespace kvant::simd {
const AttentionKernels* avx512vnni_attention_kernels() { return &avx512vnni::kAttentionKernels; }
}  // namespace kvant::simd
#else
#include "simd/attention.h"

namespace kvant::simd {
const AttentionKernels* avx512vnni_attention_kernels() { return nullptr; }
}  // namespace kvant::simd
#endif
