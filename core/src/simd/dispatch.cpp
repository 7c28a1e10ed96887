// Chooses a table of kernels for this CPU, or the one that was forced.
#include <atomic>
#include <string>

#include "kvant/isa.h"
#include "simd/attention.h"
#include "simd/attention_constants.h"
#include "simd/kernels.h"

namespace kvant::simd {
namespace {

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

#if defined(__x86_64__)
// F16C is not asked for, because clang 14 cannot: every CPU with AVX2 has it.
bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}
bool cpu_has_avx512vnni() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512vbmi");
}
#endif

std::vector<KernelTable> make_tables() {
  std::vector<KernelTable> tables;
  const auto add = [&](const char* name, const EncodeKernels* encode, const AttentionKernels* attention) {
    if (attention == nullptr) return;
    tables.push_back({name, encode != nullptr ? encode : scalar_encode_kernels(), attention});
  };
  add("scalar", scalar_encode_kernels(), scalar_attention_kernels());
#if defined(__x86_64__)
  if (__builtin_cpu_supports("ssse3")) add("hwy128", scalar_encode_kernels(), hwy128_attention_kernels());
  if (cpu_has_avx2()) add("avx2", avx2_encode_kernels(), avx2_attention_kernels());
  if (cpu_has_avx512vnni()) add("avx512vnni", avx512_encode_kernels(), avx512vnni_attention_kernels());
#else
  add("hwy128", scalar_encode_kernels(), hwy128_attention_kernels());
#endif
  return tables;
}

const std::vector<KernelTable>& tables() {
  static const std::vector<KernelTable> all = make_tables();
  return all;
}

std::atomic<const KernelTable*>& forced() {
  static std::atomic<const KernelTable*> table{nullptr};
  return table;
}

// Visits the arrays of PreparedQueries in memory order; returns the bytes they take.
size_t lay_out(const TileLayout& layout, int rows, std::byte* memory, PreparedQueries* out) {
  size_t q8_bytes = 0;
  for (int b = 0; b < layout.n_bands; ++b) {
    const auto terms = static_cast<uint8_t>(query_terms(layout.channel_scale, layout.bands[b].bits));
    out->terms[b] = terms;
    out->band_offset[b] = static_cast<uint32_t>(q8_bytes);
    q8_bytes += static_cast<size_t>(rows) * terms * layout.bands[b].channels;
  }
  q8_bytes = round_up(q8_bytes, 64);
  const size_t floats = static_cast<size_t>(layout.n_bands) * rows;
  const size_t array_bytes = round_up(floats * sizeof(float), 64);
  if (memory != nullptr) {
    out->q8 = reinterpret_cast<int8_t*>(memory);
    out->scale = reinterpret_cast<float*>(memory + q8_bytes);
    out->offset = reinterpret_cast<float*>(memory + q8_bytes + array_bytes);
    out->q_sum = reinterpret_cast<float*>(memory + q8_bytes + 2 * array_bytes);
  }
  return q8_bytes + 3 * array_bytes;
}

}  // namespace

size_t prepared_query_bytes(const TileLayout& key_layout, int rows) {
  PreparedQueries unused;
  return lay_out(key_layout, rows, nullptr, &unused);
}

void place_prepared_queries(const TileLayout& key_layout, int rows, std::byte* memory, PreparedQueries* out) {
  out->rows = rows;
  (void)lay_out(key_layout, rows, memory, out);
}

size_t pv_workspace_bytes(const TileLayout& value_layout, int rows) {
  (void)rows;
  size_t stored = 0;
  for (int b = 0; b < value_layout.n_bands; ++b) stored += value_layout.bands[b].stored_channels;
  return stored * kPageTokens;
}

const KernelTable& kernels() {
  const KernelTable* table = forced().load(std::memory_order_acquire);
  return table != nullptr ? *table : tables().back();
}

std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> out;
  for (const KernelTable& table : tables()) out.push_back(&table);
  return out;
}

Status force_kernels(std::string_view name) {
  std::string known;
  for (const KernelTable& table : tables()) {
    if (name == table.name) {
      forced().store(&table, std::memory_order_release);
      return {};
    }
    known += known.empty() ? "" : ", ";
    known += table.name;
  }
  return {Code::kInvalidArgument, "instruction set '" + std::string(name) +
                                      "' is unknown or not available here (available: " + known + ")"};
}

}  // namespace kvant::simd

namespace kvant {

std::string_view active_isa() { return simd::kernels().name; }

std::vector<std::string_view> available_isas() {
  std::vector<std::string_view> names;
  for (const simd::KernelTable* table : simd::available_kernels()) names.emplace_back(table->name);
  return names;
}

Status force_isa(std::string_view name) { return simd::force_kernels(name); }

}  // namespace kvant
