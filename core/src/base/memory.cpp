#include "kvant/memory.h"

#include <cassert>
#include <cstring>
#include <utility>

#include "base/slab_heap.h"
#include "kvant/types.h"

namespace kvant {

MemoryPool::MemoryPool() : MemoryPool(Options()) {}
MemoryPool::MemoryPool(const Options& options) : options_(options), heap_(std::make_unique<SlabHeap>()) {}

MemoryPool::~MemoryPool() { assert(total_bytes() == 0); }

size_t MemoryPool::total_bytes() const { return total_.load(std::memory_order_relaxed); }

void* MemoryPool::allocate(size_t bytes, Use use) {
  if (bytes > SIZE_MAX - kTileAlign) return nullptr;
  const size_t rounded = align_up(bytes == 0 ? 1 : bytes, kTileAlign);
  // Reserve first, so that two threads cannot pass the limit together.
  size_t before = total_.load(std::memory_order_relaxed);
  do {
    if (before > options_.limit_bytes || rounded > options_.limit_bytes - before) return nullptr;
  } while (!total_.compare_exchange_weak(before, before + rounded, std::memory_order_relaxed));
  void* p = heap_->allocate(rounded);
  if (p == nullptr) {
    total_.fetch_sub(rounded, std::memory_order_relaxed);
    return nullptr;
  }
  if (options_.poison >= 0) std::memset(p, options_.poison, rounded);
  used_[static_cast<int>(use)].fetch_add(rounded, std::memory_order_relaxed);
  size_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < before + rounded &&
         !peak_.compare_exchange_weak(peak, before + rounded, std::memory_order_relaxed)) {
  }
  return p;
}

void MemoryPool::release(void* p, size_t bytes, Use use) {
  if (p == nullptr) return;
  const size_t rounded = align_up(bytes == 0 ? 1 : bytes, kTileAlign);
  heap_->release(p, rounded);
  used_[static_cast<int>(use)].fetch_sub(rounded, std::memory_order_relaxed);
  total_.fetch_sub(rounded, std::memory_order_relaxed);
}

PoolBuffer::PoolBuffer(MemoryPool* pool, size_t bytes, Use use)
    : pool_(pool), data_(static_cast<std::byte*>(pool->allocate(bytes, use))), bytes_(bytes), use_(use) {
  if (data_ == nullptr) bytes_ = 0;
}

void PoolBuffer::reset() {
  if (data_ != nullptr) pool_->release(data_, bytes_, use_);
  data_ = nullptr;
  bytes_ = 0;
}

void PoolBuffer::swap(PoolBuffer& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(use_, other.use_);
}

}  // namespace kvant
