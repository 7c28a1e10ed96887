# kvant_warnings: link it PRIVATE to every target of ours.
add_library(kvant_warnings INTERFACE)
target_compile_options(kvant_warnings INTERFACE
  $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;$<$<BOOL:${KVANT_WERROR}>:-Werror>>>)
