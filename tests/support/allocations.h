// How often this program called operator new, in all threads.
#pragma once

#include <cstddef>

namespace kvant::test {

size_t allocations();

}  // namespace kvant::test
