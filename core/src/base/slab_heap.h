// SlabHeap: pieces of equal size back to back in mapped slabs. Resident memory follows what is in use: a slab
// is resident as far as it was touched, whole system pages of a freed piece are given back, and so is an
// empty slab.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace kvant {

// Thread safe. Sizes are multiples of kTileAlign and so are addresses. Under AddressSanitizer, and where
// pages cannot be mapped, every piece is an allocation of its own.
class SlabHeap {
 public:
  SlabHeap() = default;
  ~SlabHeap();
  SlabHeap(const SlabHeap&) = delete;
  SlabHeap& operator=(const SlabHeap&) = delete;

  void* allocate(size_t bytes);  // nullptr when the system has no memory
  void release(void* p, size_t bytes);

 private:
  // Pieces 0 .. fresh-1 were handed out at least once; `free` lists those that came back.
  struct Slab {
    size_t piece_bytes = 0, slab_bytes = 0;
    uint32_t pieces = 0, fresh = 0;
    std::vector<uint32_t> free;
  };
  std::mutex mutex_;
  std::map<std::byte*, Slab> slabs_;                  // by first byte
  std::map<size_t, std::set<std::byte*>> with_room_;  // by piece size; the lowest address is filled first
};

}  // namespace kvant
