# llama.cpp, built elsewhere as shared libraries with loadable backends, as imported targets:
#   llama::llama      libllama               headers include/
#   llama::ggml       libggml                headers ggml/include/
#   llama::ggml-base  libggml-base           headers ggml/include/, ggml/src/ (the interface that backends implement)
# Users get two definitions:
#   KVANT_LLAMA_BIN_DIR  folder of the libraries and programs. ggml looks for its CPU backend (libggml-cpu.so) only
#                        beside the running program, in the working directory and where
#                        ggml_backend_load_all_from_path() points; our programs live elsewhere and must pass this folder.
#   KVANT_GGML_VERSION   version of ggml that the sources are of, e.g. "0.25.3".
foreach(variable KVANT_LLAMA_SOURCE KVANT_LLAMA_BUILD)
  if(NOT IS_DIRECTORY "${${variable}}")
    message(FATAL_ERROR "${variable}='${${variable}}' is not a folder. `./run build` sets llama.cpp up and passes it; "
      "the library alone needs none of this: -DKVANT_CORE_ONLY=ON")
  endif()
endforeach()

set(KVANT_LLAMA_BIN_DIR ${KVANT_LLAMA_BUILD}/bin)

file(STRINGS ${KVANT_LLAMA_SOURCE}/ggml/CMakeLists.txt ggml_version_lines REGEX "^set\\(GGML_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
list(TRANSFORM ggml_version_lines REPLACE "^set\\(GGML_VERSION_[A-Z]+ ([0-9]+).*" "\\1")
list(JOIN ggml_version_lines "." KVANT_GGML_VERSION)
if(NOT KVANT_GGML_VERSION MATCHES "^[0-9]+\\.[0-9]+\\.[0-9]+$")
  message(FATAL_ERROR "cannot read ggml's version from ${KVANT_LLAMA_SOURCE}/ggml/CMakeLists.txt")
endif()

function(kvant_import_llama name)
  set(location ${KVANT_LLAMA_BIN_DIR}/lib${name}.so)
  if(NOT EXISTS ${location})
    message(FATAL_ERROR "${location} is missing: llama.cpp's build in ${KVANT_LLAMA_BUILD} is not complete (./run setup)")
  endif()
  # Linked by its real file: the folder then becomes the run path of what links it.
  add_library(llama::${name} SHARED IMPORTED GLOBAL)
  set_target_properties(llama::${name} PROPERTIES IMPORTED_LOCATION ${location} IMPORTED_SONAME lib${name}.so.0)
endfunction()

kvant_import_llama(ggml-base)
target_include_directories(llama::ggml-base SYSTEM INTERFACE ${KVANT_LLAMA_SOURCE}/ggml/include ${KVANT_LLAMA_SOURCE}/ggml/src)
target_compile_definitions(llama::ggml-base INTERFACE
  GGML_SHARED GGML_BACKEND_SHARED LLAMA_SHARED
  KVANT_LLAMA_BIN_DIR="${KVANT_LLAMA_BIN_DIR}" KVANT_GGML_VERSION="${KVANT_GGML_VERSION}")
kvant_import_llama(ggml)
target_link_libraries(llama::ggml INTERFACE llama::ggml-base)
kvant_import_llama(llama)
target_include_directories(llama::llama SYSTEM INTERFACE ${KVANT_LLAMA_SOURCE}/include)
target_link_libraries(llama::llama INTERFACE llama::ggml)
