# kvant_warnings: link it PRIVATE to every target of ours.
add_library(kvant_warnings INTERFACE)
target_compile_options(kvant_warnings INTERFACE
  $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;$<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>;$<$<BOOL:${KVANT_WERROR}>:-Werror>>>)
# -Wno-restrict: g++ 12 reports string concatenation in its own headers (GCC bug 105651).
