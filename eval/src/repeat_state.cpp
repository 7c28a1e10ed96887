// llama.cpp's sequence state: magic, sequence, streams, cells, per cell (position, sequences), then keys and
// values per layer, each with its type and row size; values are channel-major when flash attention is off.
#include <algorithm>
#include <cstring>

#include "filled_cache.h"

namespace kvant::eval {
namespace {

class Repeater {
 public:
  Repeater(const std::vector<uint8_t>& in, int tokens) : in_(in), tokens_(static_cast<uint32_t>(tokens)) {}

  Result<std::vector<uint8_t>> run() {
    copy(8);  // magic, sequence
    const auto n_streams = take<uint32_t>();
    put(n_streams);
    cells_ = take<uint32_t>();
    if (n_streams != 1 || cells_ == 0) return Status(Code::kCorrupt, "not the state of one filled sequence");
    put(tokens_);
    repeat_cells();
    const auto transposed = take<uint32_t>();
    const auto layers = take<uint32_t>();
    put(transposed);
    put(layers);
    for (uint32_t layer = 0; layer < layers; ++layer) repeat_rows();
    for (uint32_t layer = 0; layer < layers; ++layer) {
      if (transposed != 0) {
        repeat_columns();
      } else {
        repeat_rows();
      }
    }
    if (bad_ || at_ != in_.size()) return Status(Code::kCorrupt, "a sequence state of another layout");
    return std::move(out_);
  }

 private:
  template <typename T>
  T take() {
    T value{};
    if (const uint8_t* p = bytes(sizeof(T))) std::memcpy(&value, p, sizeof(T));
    return value;
  }
  template <typename T>
  void put(T value) {
    const auto* p = reinterpret_cast<const uint8_t*>(&value);
    out_.insert(out_.end(), p, p + sizeof(T));
  }
  const uint8_t* bytes(size_t n) {
    if (bad_ || n > in_.size() - at_) {
      bad_ = true;
      return nullptr;
    }
    at_ += n;
    return in_.data() + at_ - n;
  }
  void copy(size_t n) {
    if (const uint8_t* p = bytes(n)) out_.insert(out_.end(), p, p + n);
  }
  void repeat(size_t item_bytes) {
    const uint8_t* p = bytes(item_bytes * cells_);
    if (p == nullptr) return;
    for (uint32_t left = tokens_; left > 0;) {
      const uint32_t n = std::min(left, cells_);
      out_.insert(out_.end(), p, p + item_bytes * n);
      left -= n;
    }
  }
  void repeat_cells() {
    int32_t sequence = 0;
    for (uint32_t i = 0; i < cells_ && !bad_; ++i) {
      (void)take<int32_t>();
      if (take<uint32_t>() != 1) bad_ = true;
      sequence = take<int32_t>();
    }
    for (uint32_t i = 0; i < tokens_; ++i) {
      put(static_cast<int32_t>(i));
      put(uint32_t{1});
      put(sequence);
    }
  }
  void repeat_rows() {
    copy(4);
    const auto row_bytes = take<uint64_t>();
    put(row_bytes);
    repeat(row_bytes);
  }
  void repeat_columns() {
    copy(4);
    const auto item_bytes = take<uint32_t>();
    const auto channels = take<uint32_t>();
    put(item_bytes);
    put(channels);
    for (uint32_t c = 0; c < channels && !bad_; ++c) repeat(item_bytes);
  }

  const std::vector<uint8_t>& in_;
  uint32_t tokens_;
  uint32_t cells_ = 0;
  size_t at_ = 0;
  bool bad_ = false;
  std::vector<uint8_t> out_;
};

}  // namespace

Result<std::vector<uint8_t>> repeat_state(const std::vector<uint8_t>& state, int tokens) {
  return Repeater(state, tokens).run();
}

}  // namespace kvant::eval
