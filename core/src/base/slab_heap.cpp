#include "base/slab_heap.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "kvant/memory.h"
#include "kvant/types.h"

#if defined(__SANITIZE_ADDRESS__)
#define KVANT_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVANT_ADDRESS_SANITIZER 1
#endif
#endif

#if defined(__linux__) && !defined(KVANT_ADDRESS_SANITIZER)
#define KVANT_MAPPED_SLABS 1
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace kvant {

#if defined(KVANT_MAPPED_SLABS)
namespace {

// Larger pieces are whole allocations: tables and workspaces, of which there are few.
constexpr size_t kLargestPiece = size_t{1} << 18;
// At least so many pieces a slab, so that its unused end is under 2 % of it.
constexpr size_t kPiecesPerSlab = 64;
constexpr size_t kHugePage = size_t{1} << 21;

size_t system_page() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Address space that starts on a huge page; nothing of it is resident yet.
std::byte* map_slab(size_t bytes) {
  const size_t reserved = bytes + kHugePage;
  void* mapped =
      mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(mapped);
  const size_t skip =
      align_up(reinterpret_cast<uintptr_t>(begin), kHugePage) - reinterpret_cast<uintptr_t>(begin);
  if (skip != 0) munmap(begin, skip);
  if (kHugePage - skip != 0) munmap(begin + skip + bytes, kHugePage - skip);
  return begin + skip;
}

// A full slab is moved to huge pages, where the system can (Linux 6.1): a long sequence reads thousands of
// tiles in turn, and walking the page tables for each costs more than the tile. Before that its unused end
// would be resident.
void collapse(std::byte* slab, size_t bytes) {
#if !defined(MADV_COLLAPSE)
  constexpr int MADV_COLLAPSE = 25;
#endif
  (void)madvise(slab, bytes, MADV_COLLAPSE);
}

}  // namespace

SlabHeap::~SlabHeap() {
  for (const auto& [base, slab] : slabs_) munmap(base, slab.slab_bytes);
}

void* SlabHeap::allocate(size_t bytes) {
  if (bytes > kLargestPiece) return std::aligned_alloc(kTileAlign, bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<std::byte*>& open = with_room_[bytes];
  if (open.empty()) {
    const size_t slab_bytes = align_up(kPiecesPerSlab * bytes, kHugePage);
    std::byte* mapped = map_slab(slab_bytes);
    if (mapped == nullptr) return nullptr;
    slabs_[mapped] = {.piece_bytes = bytes,
                      .slab_bytes = slab_bytes,
                      .pieces = static_cast<uint32_t>(slab_bytes / bytes),
                      .fresh = 0,
                      .free = {}};
    open.insert(mapped);
  }
  std::byte* base = *open.begin();
  Slab& slab = slabs_[base];
  uint32_t piece = slab.fresh;
  if (slab.free.empty()) {
    ++slab.fresh;
    if (slab.fresh == slab.pieces) collapse(base, slab.slab_bytes);
  } else {
    piece = slab.free.back();
    slab.free.pop_back();
  }
  if (slab.free.empty() && slab.fresh == slab.pieces) open.erase(base);
  return base + piece * bytes;
}

void SlabHeap::release(void* p, size_t bytes) {
  if (bytes > kLargestPiece) {
    std::free(p);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  auto* at = static_cast<std::byte*>(p);
  const auto found = std::prev(slabs_.upper_bound(at));
  std::byte* base = found->first;
  Slab& slab = found->second;
  slab.free.push_back(static_cast<uint32_t>(static_cast<size_t>(at - base) / bytes));
  if (slab.free.size() == slab.fresh) {
    with_room_[bytes].erase(base);
    munmap(base, slab.slab_bytes);
    slabs_.erase(found);
    return;
  }
  with_room_[bytes].insert(base);
  const size_t page = system_page();
  const size_t first = align_up(static_cast<size_t>(at - base), page);
  const size_t end = (static_cast<size_t>(at - base) + bytes) / page * page;
  if (end > first) madvise(base + first, end - first, MADV_DONTNEED);
}

#else

SlabHeap::~SlabHeap() = default;
void* SlabHeap::allocate(size_t bytes) { return std::aligned_alloc(kTileAlign, bytes); }
void SlabHeap::release(void* p, size_t) { std::free(p); }

#endif

}  // namespace kvant
