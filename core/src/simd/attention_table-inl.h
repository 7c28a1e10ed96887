// The kernels of the target: included by the ISA files after all others.
namespace kvant::simd::KVANT_TARGET {
namespace {

constexpr AttentionKernels kAttentionKernels = {prepare_queries, qk_tiles, qk_rows,  qk_floats, softmax,
                                                rescale_rows,    combine,  pv_tiles, pv_rows,   pv_floats};

}  // namespace
}  // namespace kvant::simd::KVANT_TARGET
