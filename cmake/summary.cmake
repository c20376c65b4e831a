# What this configuration builds, in a line each: a host sees what it has asked for.
function(kvant_summary name with without)
  if(${name})
    message(STATUS "kvant:   ${with}")
  elseif(NOT without STREQUAL "")
    message(STATUS "kvant:   ${without}")
  endif()
endfunction()

set(kvant_kind "static library")
if(BUILD_SHARED_LIBS)
  set(kvant_kind "shared library")
endif()
message(STATUS "kvant ${PROJECT_VERSION}: ${kvant_kind}, ${CMAKE_BUILD_TYPE}, "
  "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
kvant_summary(KVANT_CUDA_FOUND
  "the CUDA backend for ${KVANT_CUDA_ARCHITECTURES} (KVANT_CUDA=${KVANT_CUDA}), pairs of formats: ${KVANT_CUDA_PAIRS}"
  "no CUDA backend (KVANT_CUDA=${KVANT_CUDA})")
kvant_summary(KVANT_OPENMP "threads through OpenMP (KVANT_OPENMP=ON)" "threads of its own (KVANT_OPENMP=OFF)")
kvant_summary(KVANT_CALIBRATE_FOUND "calibration (KVANT_CALIBRATE=${KVANT_CALIBRATE})"
  "no calibration (KVANT_CALIBRATE=${KVANT_CALIBRATE})")
kvant_summary(KVANT_BUILD_CLI "the command line tool (KVANT_BUILD_CLI=ON)" "no command line tool (KVANT_BUILD_CLI=OFF)")
kvant_summary(KVANT_BUILD_TESTS "the tests (KVANT_BUILD_TESTS=ON)" "")
kvant_summary(KVANT_BUILD_EXAMPLES "the examples (KVANT_BUILD_EXAMPLES=ON)" "")
kvant_summary(KVANT_INSTALL "install rules (KVANT_INSTALL=ON)" "no install rules (KVANT_INSTALL=OFF)")
