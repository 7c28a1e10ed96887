// Status and Result: how core reports errors. Core never throws, prints or aborts on input.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace kvant {

// One value per kind of failure; edges map these to exit codes in one table (docs/cli.md).
enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument,  // an option or argument is malformed or out of its range
  kUnsupported,      // well-formed, but this combination cannot run
  kOutOfRange,       // a slot, page, layer or head index beyond the end
  kPoolExhausted,    // the memory limit of the cache is reached
  kBadValue,         // NaN or Inf in keys or values
  kCorrupt,          // stored bytes fail their checksum or their bounds
  kMismatch,         // stored for another model, shape, format or version
  kIo,               // a file cannot be read or written
  kCancelled,
  kInternal,
};

const char* code_name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Either a value or a failed Status. value() may only be called when ok().
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace kvant

#define KVANT_RETURN_IF_ERROR(expr)                \
  do {                                             \
    ::kvant::Status kvant_status_ = (expr);        \
    if (!kvant_status_.ok()) return kvant_status_; \
  } while (false)
