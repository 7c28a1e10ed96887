// Counted, aligned memory: every byte that a cache owns comes from one MemoryPool, so that the size formula
// can be compared with the allocator to the byte.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvant {

// What a byte is used for; the parts that `kvant run` and `plan` print.
enum class Use : uint8_t { kTiles = 0, kExactRows, kTables, kWorkspace };
inline constexpr int kUses = 4;

// Thread safe. Counts the bytes asked for (each request is a multiple of 64 bytes by construction of its
// callers, else it is rounded up and counted so). Refuses, without side effects, what would pass the limit.
// Requests of one size lie back to back in mapped slabs: a process grows by what is counted, not by what a
// general allocator adds around it. Freed bytes are given back to the system at once; `poison` fills fresh
// memory with a byte to expose reads of unwritten memory in tests.
class MemoryPool {
 public:
  struct Options {
    size_t limit_bytes = SIZE_MAX;
    int poison = -1;  // 0..255: fill fresh memory with this byte; -1: leave as it comes
  };
  MemoryPool();
  explicit MemoryPool(const Options& options);
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // 64-byte aligned, or nullptr when the limit would be passed or the system has no memory.
  void* allocate(size_t bytes, Use use);
  void release(void* p, size_t bytes, Use use);

  size_t bytes(Use use) const { return used_[static_cast<int>(use)].load(std::memory_order_relaxed); }
  size_t total_bytes() const;
  size_t peak_bytes() const { return peak_.load(std::memory_order_relaxed); }
  size_t limit_bytes() const { return options_.limit_bytes; }

 private:
  Options options_;
  std::unique_ptr<class SlabHeap> heap_;
  std::atomic<size_t> used_[kUses] = {};
  std::atomic<size_t> total_{0};
  std::atomic<size_t> peak_{0};
};

// Owns one allocation of a pool; movable. The pool must outlive it.
class PoolBuffer {
 public:
  PoolBuffer() = default;
  PoolBuffer(MemoryPool* pool, size_t bytes, Use use);  // check data() for failure
  ~PoolBuffer() { reset(); }
  PoolBuffer(PoolBuffer&& other) noexcept { swap(other); }
  PoolBuffer& operator=(PoolBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  void reset();
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  void swap(PoolBuffer& other) noexcept;
  MemoryPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  Use use_ = Use::kTables;
};

// Bytes rounded up to a multiple of `align` (a power of two).
constexpr size_t align_up(size_t bytes, size_t align) { return (bytes + align - 1) & ~(align - 1); }

}  // namespace kvant
