#include "kvant/memory.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "kvant/types.h"

namespace kvant {
namespace {

TEST(MemoryPool, CountsByUseAndGivesBack) {
  MemoryPool pool;
  void* tile = pool.allocate(1000, Use::kTiles);
  void* rows = pool.allocate(64, Use::kExactRows);
  ASSERT_NE(tile, nullptr);
  ASSERT_NE(rows, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tile) % kTileAlign, 0u);
  EXPECT_EQ(pool.bytes(Use::kTiles), 1024u);  // rounded up to 64
  EXPECT_EQ(pool.bytes(Use::kExactRows), 64u);
  EXPECT_EQ(pool.bytes(Use::kTables), 0u);
  EXPECT_EQ(pool.total_bytes(), 1088u);
  pool.release(tile, 1000, Use::kTiles);
  EXPECT_EQ(pool.total_bytes(), 64u);
  EXPECT_EQ(pool.peak_bytes(), 1088u);
  pool.release(rows, 64, Use::kExactRows);
  EXPECT_EQ(pool.total_bytes(), 0u);
}

TEST(MemoryPool, RefusesBeyondTheLimitWithoutSideEffects) {
  MemoryPool pool({.limit_bytes = 256});
  void* a = pool.allocate(192, Use::kTiles);
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(pool.allocate(128, Use::kTiles), nullptr);
  EXPECT_EQ(pool.allocate(SIZE_MAX, Use::kTiles), nullptr);
  EXPECT_EQ(pool.total_bytes(), 192u);
  EXPECT_EQ(pool.peak_bytes(), 192u);
  void* b = pool.allocate(64, Use::kTables);
  EXPECT_NE(b, nullptr);
  pool.release(a, 192, Use::kTiles);
  pool.release(b, 64, Use::kTables);
}

TEST(MemoryPool, PoisonsFreshMemory) {
  for (int poison : {0xaa, 0xff, 0}) {
    MemoryPool pool({.poison = poison});
    PoolBuffer buffer(&pool, 100, Use::kWorkspace);
    ASSERT_TRUE(buffer);
    for (size_t i = 0; i < 128; ++i) ASSERT_EQ(buffer.data()[i], static_cast<std::byte>(poison));
  }
}

TEST(MemoryPool, LimitHoldsBetweenThreads) {
  MemoryPool pool({.limit_bytes = 64 * 100});
  std::vector<std::thread> threads;
  std::atomic<int> granted{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 500; ++j) {
        PoolBuffer held(&pool, 64 * 60, Use::kTiles);
        if (held) granted.fetch_add(1);
        EXPECT_LE(pool.total_bytes(), 64u * 100);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(granted.load(), 0);
  EXPECT_EQ(pool.total_bytes(), 0u);
  EXPECT_EQ(pool.peak_bytes(), 64u * 60);
}

TEST(PoolBuffer, MovesItsAllocation) {
  MemoryPool pool({.limit_bytes = 128});
  PoolBuffer a(&pool, 128, Use::kTables);
  std::byte* const data = a.data();
  PoolBuffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(pool.bytes(Use::kTables), 128u);
  PoolBuffer refused(&pool, 1, Use::kTables);
  EXPECT_FALSE(refused);
  EXPECT_EQ(refused.bytes(), 0u);
  b.reset();
  EXPECT_EQ(pool.total_bytes(), 0u);
}

}  // namespace
}  // namespace kvant
