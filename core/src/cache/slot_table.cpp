#include "cache/slot_table.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvant {
namespace {

constexpr uint16_t kMinusInfinity = 0xFC00;

// A slot that no query of the batch sees may belong to a sequence that is not in the batch. Its page keeps
// its rows while the slot is among this many newest tokens of the stream.
constexpr uint32_t kUnseenGrace = 4096;

struct MaskWord {
  uint64_t visible = 0;
  uint64_t bias = 0;  // neither 0 nor -inf
};

MaskWord read_mask_word(const uint16_t* mask) {
  MaskWord word;
#if defined(__SSE2__)
  const __m128i inf = _mm_set1_epi16(static_cast<int16_t>(kMinusInfinity));
  const __m128i magnitude = _mm_set1_epi16(0x7FFF);
  for (int i = 0; i < 4; ++i) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mask + 16 * i));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mask + 16 * i + 8));
    const __m128i hidden = _mm_packs_epi16(_mm_cmpeq_epi16(a, inf), _mm_cmpeq_epi16(b, inf));
    const __m128i zero = _mm_packs_epi16(_mm_cmpeq_epi16(_mm_and_si128(a, magnitude), _mm_setzero_si128()),
                                         _mm_cmpeq_epi16(_mm_and_si128(b, magnitude), _mm_setzero_si128()));
    const uint64_t h = static_cast<uint16_t>(_mm_movemask_epi8(hidden));
    const uint64_t z = static_cast<uint16_t>(_mm_movemask_epi8(zero));
    word.visible |= (~h & 0xFFFF) << (16 * i);
    word.bias |= (~(h | z) & 0xFFFF) << (16 * i);
  }
#else
  for (int t = 0; t < kPageTokens; ++t) {
    const uint64_t visible = mask[t] != kMinusInfinity;
    word.visible |= visible << t;
    word.bias |= (visible & uint64_t{(mask[t] & 0x7FFF) != 0}) << t;
  }
#endif
  return word;
}

uint64_t slot_bit(int slot) { return uint64_t{1} << (slot % kPageTokens); }

size_t stream_bytes(int n_pages) {
  const size_t slots = static_cast<size_t>(n_pages) * kPageTokens;
  return align_up(slots * 4, 64) + align_up(slots * 8, 64) +
         3 * align_up(static_cast<size_t>(n_pages) * 8, 64);
}

}  // namespace

size_t SlotTable::bytes(int n_pages, int n_streams) {
  return stream_bytes(n_pages) * static_cast<size_t>(n_streams);
}

SlotTable::SlotTable(int n_pages, int n_streams, MemoryPool* pool)
    : n_pages_(n_pages),
      n_slots_(n_pages * kPageTokens),
      memory_(pool, bytes(n_pages, n_streams), Use::kTables) {
  if (!memory_) return;
  std::byte* p = memory_.data();
  auto take = [&p](size_t n) {
    std::byte* at = p;
    p += align_up(n, 64);
    return at;
  };
  const size_t slots = static_cast<size_t>(n_slots_);
  for (int i = 0; i < n_streams; ++i) {
    Stream s;
    s.stamp = reinterpret_cast<uint32_t*>(take(slots * 4));
    s.order = reinterpret_cast<int32_t*>(take(slots * 8));
    s.filled = reinterpret_cast<uint64_t*>(take(static_cast<size_t>(n_pages) * 8));
    s.sinks = reinterpret_cast<uint64_t*>(take(static_cast<size_t>(n_pages) * 8));
    s.adopted = reinterpret_cast<uint64_t*>(take(static_cast<size_t>(n_pages) * 8));
    streams_.push_back(s);
  }
  clear();
}

void SlotTable::clear() {
  std::memset(memory_.data(), 0, memory_.bytes());
  for (Stream& s : streams_) {
    s.newest = 0;
    s.last_slot = -1;
    s.ascending = true;
  }
  undo_.clear();
}

void SlotTable::compact(Stream* s) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < s->newest; ++i) {
    const int32_t slot = s->order[i];
    if (s->stamp[slot] != i + 1) continue;
    s->order[kept] = slot;
    s->stamp[slot] = ++kept;
  }
  s->newest = kept;
}

void SlotTable::write(int stream, int slot) {
  Stream& s = streams_[stream];
  if (s.newest == 2 * static_cast<uint32_t>(n_slots_)) {
    s.stamp[slot] = 0;
    compact(&s);
  }
  const uint64_t bit = slot_bit(slot);
  const int page = slot / kPageTokens;
  s.order[s.newest] = slot;
  s.stamp[slot] = ++s.newest;
  s.ascending = s.ascending && slot > s.last_slot;
  s.last_slot = slot;
  s.filled[page] |= bit;
  s.sinks[page] &= ~bit;
  s.adopted[page] &= ~bit;
}

void SlotTable::write_batch(std::span<const int64_t> slots) {
  // Stamps in the undo list stay valid: no write of this batch reaches the end of `order`.
  for (size_t i = 0; i < streams_.size() && undo_.empty(); ++i) {
    if (streams_[i].newest + slots.size() > 2 * static_cast<size_t>(n_slots_)) compact(&streams_[i]);
  }
  for (const int64_t global : slots) {
    const int stream = static_cast<int>(global / n_slots_);
    const int slot = static_cast<int>(global % n_slots_);
    const Stream& s = streams_[stream];
    const uint64_t bit = slot_bit(slot);
    const int page = slot / kPageTokens;
    undo_.push_back({.stream = stream,
                     .slot = slot,
                     .last_slot = s.last_slot,
                     .stamp = s.stamp[slot],
                     .ascending = s.ascending,
                     .filled = (s.filled[page] & bit) != 0,
                     .sink = (s.sinks[page] & bit) != 0,
                     .adopted = (s.adopted[page] & bit) != 0});
    write(stream, slot);
  }
}

void SlotTable::undo_batch() {
  for (auto u = undo_.rbegin(); u != undo_.rend(); ++u) {
    Stream& s = streams_[u->stream];
    const uint64_t bit = slot_bit(u->slot);
    const int page = u->slot / kPageTokens;
    --s.newest;
    s.stamp[u->slot] = u->stamp;
    s.last_slot = u->last_slot;
    s.ascending = u->ascending;
    if (!u->filled) s.filled[page] &= ~bit;
    if (u->sink) s.sinks[page] |= bit;
    if (u->adopted) s.adopted[page] |= bit;
  }
  undo_.clear();
}

void SlotTable::adopt(int stream, int slot) {
  write(stream, slot);
  streams_[stream].adopted[slot / kPageTokens] |= slot_bit(slot);
}

bool SlotTable::is_newest_run(int stream, int first, int count) const {
  const Stream& s = streams_[stream];
  if (count == 0 || static_cast<uint32_t>(count) > s.newest) return false;
  for (int i = 0; i < count; ++i) {
    if (s.stamp[first + i] != s.newest - static_cast<uint32_t>(count - 1 - i)) return false;
  }
  return true;
}

void SlotTable::copy_stream(int from, int to) {
  Stream& d = streams_[to];
  const Stream& s = streams_[from];
  std::memcpy(d.stamp, s.stamp, static_cast<size_t>(n_slots_) * 4);
  std::memcpy(d.order, s.order, static_cast<size_t>(s.newest) * 4);
  std::memcpy(d.filled, s.filled, static_cast<size_t>(n_pages_) * 8);
  std::memcpy(d.sinks, s.sinks, static_cast<size_t>(n_pages_) * 8);
  std::memcpy(d.adopted, s.adopted, static_cast<size_t>(n_pages_) * 8);
  d.newest = s.newest;
  d.last_slot = s.last_slot;
  d.ascending = s.ascending;
}

int SlotTable::used_slots(int stream) const {
  int used = 0;
  for (int p = 0; p < n_pages_; ++p) used += std::popcount(streams_[stream].filled[p]);
  return used;
}

void SlotTable::read_masks(const Stream& s, const StreamQueries& queries, StreamPlan* out) const {
  const int n_pages = out->n_pages;
  const uint64_t tail = queries.n_slots % kPageTokens == 0
                            ? ~uint64_t{0}
                            : (uint64_t{1} << (queries.n_slots % kPageTokens)) - 1;
  out->visible.assign(static_cast<size_t>(out->n_queries) * n_pages, 0);
  out->has_bias = false;
  uint16_t padded[kPageTokens];
  for (int i = 0; i < out->n_queries; ++i) {
    uint64_t* row = out->visible.data() + static_cast<size_t>(i) * n_pages;
    for (int p = 0; p < n_pages; ++p) {
      uint64_t bits = s.filled[p] & (p + 1 == n_pages ? tail : ~uint64_t{0});
      if (queries.mask != nullptr && bits != 0) {
        const uint16_t* mask = queries.mask + static_cast<size_t>(i) * queries.mask_stride +
                               static_cast<size_t>(p) * kPageTokens;
        if (p + 1 == n_pages && tail != ~uint64_t{0}) {
          std::fill_n(padded, kPageTokens, kMinusInfinity);
          std::copy_n(mask, queries.n_slots % kPageTokens, padded);
          mask = padded;
        }
        const MaskWord word = read_mask_word(mask);
        bits &= word.visible;
        out->has_bias = out->has_bias || (word.bias & bits) != 0;
      }
      row[p] = bits;
    }
  }
}

void SlotTable::find_sinks(const Stream& s, const StreamQueries& queries, int sinks, StreamPlan* out) const {
  out->sinks.clear();
  const bool any_adopted =
      std::any_of(s.adopted, s.adopted + out->n_pages, [](uint64_t word) { return word != 0; });
  for (int i = 0; i < out->n_queries; ++i) {
    const int slot = i < static_cast<int>(queries.own_slot.size()) ? queries.own_slot[i] : -1;
    const uint64_t* row = out->visible.data() + static_cast<size_t>(i) * out->n_pages;
    int seen = 0;
    bool adopted = false;
    for (int p = 0; p < out->n_pages && (seen <= sinks || any_adopted); ++p) {
      seen += std::popcount(row[p]);
      adopted = adopted || (row[p] & s.adopted[p]) != 0;
    }
    if (slot >= 0 && seen <= sinks) out->sinks.push_back(slot);
    if (adopted) find_adopted_sinks(s, i, sinks, out);
  }
}

// The oldest tokens that the query sees.
void SlotTable::find_adopted_sinks(const Stream& s, int query, int sinks, StreamPlan* out) const {
  const uint64_t* row = out->visible.data() + static_cast<size_t>(query) * out->n_pages;
  int left = sinks;
  for (uint32_t k = 0; k < s.newest && left > 0; ++k) {
    const int32_t slot = s.order[k];
    const int p = slot / kPageTokens;
    if (s.stamp[slot] != k + 1 || p >= out->n_pages || (row[p] & slot_bit(slot)) == 0) continue;
    out->sinks.push_back(slot);
    --left;
  }
}

void SlotTable::mark_sinks(const StreamPlan& plan) {
  Stream& s = streams_[plan.stream.value];
  for (const int32_t slot : plan.sinks) s.sinks[slot / kPageTokens] |= slot_bit(slot);
  for (int p = 0; p < plan.n_pages; ++p) {
    for (int i = 0; i < plan.n_queries && s.adopted[p] != 0; ++i) {
      s.adopted[p] &= ~plan.visible[static_cast<size_t>(i) * plan.n_pages + p];
    }
  }
}

void SlotTable::find_windows(const Stream& s, int window, StreamPlan* out) const {
  const int n_pages = out->n_pages;
  const size_t words = (static_cast<size_t>(n_pages) + 63) / 64;
  out->window.assign(words * out->n_queries, 0);
  for (int i = 0; i < out->n_queries; ++i) {
    const uint64_t* row = out->visible.data() + static_cast<size_t>(i) * n_pages;
    uint64_t* bits = out->window.data() + words * i;
    int left = window;
    if (s.ascending) {
      for (int p = n_pages - 1; p >= 0 && left > 0; --p) {
        if (row[p] == 0) continue;
        bits[p / 64] |= uint64_t{1} << (p % 64);
        left -= std::popcount(row[p]);
      }
      continue;
    }
    for (uint32_t k = s.newest; k > 0 && left > 0; --k) {
      const int32_t slot = s.order[k - 1];
      const int p = slot / kPageTokens;
      if (s.stamp[slot] != k || p >= n_pages || ((row[p] >> (slot % kPageTokens)) & 1) == 0) continue;
      bits[p / 64] |= uint64_t{1} << (p % 64);
      --left;
    }
  }
}

void SlotTable::choose_pages(const Stream& s, const StreamQueries& queries, StreamPlan* out) const {
  const int n_pages = out->n_pages;
  auto row = [&](int i) { return out->visible.data() + static_cast<size_t>(i) * n_pages; };
  // A query is superseded when a later one sees its token: the later one is further on in the sequence.
  std::vector<char> superseded(out->n_queries, 0);
  for (int i = 0; i < out->n_queries && i < static_cast<int>(queries.own_slot.size()); ++i) {
    const int slot = queries.own_slot[i];
    if (slot < 0) continue;
    for (int j = i + 1; j < out->n_queries && !superseded[i]; ++j) {
      superseded[i] = (row(j)[slot / kPageTokens] >> (slot % kPageTokens)) & 1;
    }
  }
  out->seal.clear();
  out->release.clear();
  for (int p = 0; p < n_pages; ++p) {
    if (s.filled[p] != ~uint64_t{0}) continue;
    bool quantized = false;
    bool needed = false;
    uint64_t seen = 0;
    for (int i = 0; i < out->n_queries; ++i) {
      if (row(i)[p] == 0) continue;
      const bool in_window = out->in_window(i, p);
      quantized = quantized || !in_window;
      seen |= row(i)[p];
      needed = needed || (in_window && !superseded[i]);
    }
    if (!quantized) continue;
    out->seal.push_back(p);
    uint64_t unseen = ~seen;
    while (unseen != 0 && !needed) {
      const int t = std::countr_zero(unseen);
      unseen &= unseen - 1;
      needed = s.newest - s.stamp[p * kPageTokens + t] < kUnseenGrace;
    }
    if (!needed) out->release.push_back(p);
  }
}

void SlotTable::plan(const StreamQueries& queries, int window, int sinks, StreamPlan* out) const {
  const Stream& s = streams_[queries.stream.value];
  out->stream = queries.stream;
  out->n_queries = queries.n_queries;
  out->n_pages = (queries.n_slots + kPageTokens - 1) / kPageTokens;
  out->mask = queries.mask;
  out->mask_stride = queries.mask_stride;
  read_masks(s, queries, out);
  find_sinks(s, queries, sinks, out);
  // The page of the newest token is never read from its tile: whether it is full already depends on the
  // chunk.
  find_windows(s, std::max(window, 1), out);
  choose_pages(s, queries, out);
}

}  // namespace kvant
