// What the exit code of kvant says. The one table: docs/cli.md and `kvant --help` show it.
#pragma once

#include <span>
#include <string_view>

#include "kvant/status.h"

namespace kvant::cli {

enum ExitCode : int {
  kOk = 0,
  kFailed = 1,
  kUsage = 2,
  kUnsupportedExit = 3,
  kBadFile = 4,
  kMemory = 5,
  kMismatchExit = 6,
  kCorruptExit = 7,
  kBarFailed = 8,
  kBadValues = 9,
  kInterrupted = 130,
};

struct ExitMeaning {
  ExitCode code;
  std::string_view meaning;
};

inline constexpr ExitMeaning kExitTable[] = {
    {kOk, "done"},
    {kFailed, "internal error"},
    {kUsage, "an option or its value is wrong, or out of range"},
    {kUnsupportedExit, "well-formed, but this combination cannot run"},
    {kBadFile, "a file cannot be read or written, or is not what it should be"},
    {kMemory, "the memory limit is reached, or the context is full"},
    {kMismatchExit, "stored for another model, shape, format or version"},
    {kCorruptExit, "stored bytes fail their checksum"},
    {kBarFailed, "the comparison ran, and a bar that was asked for is not met"},
    {kBadValues, "the model computed NaN or infinite keys or values"},
    {kInterrupted, "interrupted (Ctrl-C); what was finished is printed"},
};

constexpr ExitCode exit_code(Code code) {
  switch (code) {
    case Code::kOk:
      return kOk;
    case Code::kInvalidArgument:
    case Code::kOutOfRange:
      return kUsage;
    case Code::kUnsupported:
      return kUnsupportedExit;
    case Code::kPoolExhausted:
      return kMemory;
    case Code::kBadValue:
      return kBadValues;
    case Code::kCorrupt:
      return kCorruptExit;
    case Code::kMismatch:
      return kMismatchExit;
    case Code::kIo:
      return kBadFile;
    case Code::kCancelled:
      return kInterrupted;
    case Code::kInternal:
      return kFailed;
  }
  return kFailed;
}

}  // namespace kvant::cli
