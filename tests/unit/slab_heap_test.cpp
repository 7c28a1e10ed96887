// SlabHeap: pieces of one size lie back to back, freed pieces are handed out again with the lowest slab
// first, and what is freed is not resident any more.
#include "base/slab_heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "kvant/types.h"

#if defined(__SANITIZE_ADDRESS__) || !defined(__linux__)
#define KVANT_NO_SLABS 1
#endif

namespace kvant {
namespace {

uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

TEST(SlabHeap, PiecesAreAlignedAndApart) {
  SlabHeap heap;
  // The last two are larger than what slabs hold.
  for (const size_t bytes :
       {size_t{64}, size_t{4160}, size_t{1} << 18, (size_t{1} << 18) + 64, size_t{1} << 20}) {
    std::vector<std::byte*> pieces;
    for (int i = 0; i < 70; ++i) {
      auto* p = static_cast<std::byte*>(heap.allocate(bytes));
      ASSERT_NE(p, nullptr);
      EXPECT_EQ(address(p) % kTileAlign, 0u);
      std::memset(p, i, bytes);
      pieces.push_back(p);
    }
    for (int i = 0; i < 70; ++i) {
      EXPECT_EQ(pieces[i][0], static_cast<std::byte>(i));
      EXPECT_EQ(pieces[i][bytes - 1], static_cast<std::byte>(i));
      heap.release(pieces[i], bytes);
    }
  }
}

TEST(SlabHeap, ThreadsShareIt) {
  SlabHeap heap;
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&heap, id] {
      std::vector<std::byte*> held;
      for (int i = 0; i < 400; ++i) {
        auto* p = static_cast<std::byte*>(heap.allocate(4160));
        std::memset(p, id + 1, 4160);
        held.push_back(p);
        if (i % 3 != 0) continue;
        EXPECT_EQ(held.front()[4159], static_cast<std::byte>(id + 1));
        heap.release(held.front(), 4160);
        held.erase(held.begin());
      }
      for (std::byte* p : held) {
        EXPECT_EQ(p[0], static_cast<std::byte>(id + 1));
        heap.release(p, 4160);
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

#if !defined(KVANT_NO_SLABS)

size_t resident_bytes() {
  size_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * 4096;
}

TEST(SlabHeap, PiecesLieBackToBack) {
  SlabHeap heap;
  auto* first = static_cast<std::byte*>(heap.allocate(4160));
  for (size_t i = 1; i < 300; ++i) EXPECT_EQ(heap.allocate(4160), first + i * 4160);
  // Another size has slabs of its own.
  auto* other = static_cast<std::byte*>(heap.allocate(64));
  EXPECT_TRUE(other < first || other >= first + (size_t{1} << 21));
}

TEST(SlabHeap, FreedPiecesAreUsedFirst) {
  SlabHeap heap;
  // 2 MiB / 8192 = 256 pieces a slab: three slabs, the third with 88 pieces.
  std::vector<std::byte*> pieces;
  for (int i = 0; i < 600; ++i) pieces.push_back(static_cast<std::byte*>(heap.allocate(8192)));
  // The lowest slab is filled first; every slab has 88 pieces or more.
  std::sort(pieces.begin(), pieces.end());
  std::byte* a = pieces[5];
  std::byte* b = pieces[60];
  heap.release(a, 8192);
  heap.release(b, 8192);
  EXPECT_EQ(heap.allocate(8192), b);
  EXPECT_EQ(heap.allocate(8192), a);
  std::byte* fresh = static_cast<std::byte*>(heap.allocate(8192));
  EXPECT_EQ(std::count(pieces.begin(), pieces.end(), fresh), 0);
}

TEST(SlabHeap, FreedBytesAreNotResident) {
  SlabHeap heap;
  constexpr size_t kBytes = 65536;
  constexpr int kPieces = 1024;
  const size_t before = resident_bytes();
  std::vector<std::byte*> pieces;
  for (int i = 0; i < kPieces; ++i) {
    pieces.push_back(static_cast<std::byte*>(heap.allocate(kBytes)));
    std::memset(pieces.back(), 1, kBytes);
  }
  const size_t full = resident_bytes();
  EXPECT_GE(full - before, kPieces * kBytes);
  // Every second piece: no slab is empty, half of the bytes go back.
  for (int i = 0; i < kPieces; i += 2) heap.release(pieces[i], kBytes);
  EXPECT_LE(resident_bytes(), full - kPieces * kBytes * 9 / 20);
  for (int i = 1; i < kPieces; i += 2) EXPECT_EQ(pieces[i][kBytes - 1], std::byte{1});
  for (int i = 1; i < kPieces; i += 2) heap.release(pieces[i], kBytes);
  EXPECT_LE(resident_bytes(), before + (size_t{4} << 20));
}

#endif

}  // namespace
}  // namespace kvant
