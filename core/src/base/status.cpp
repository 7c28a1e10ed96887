#include "kvant/status.h"

namespace kvant {

const char* code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kOutOfRange:
      return "out of range";
    case Code::kPoolExhausted:
      return "memory limit reached";
    case Code::kBadValue:
      return "bad value";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kMismatch:
      return "mismatch";
    case Code::kIo:
      return "input/output error";
    case Code::kCancelled:
      return "cancelled";
    case Code::kInternal:
      return "internal error";
  }
  return "unknown";
}

}  // namespace kvant
