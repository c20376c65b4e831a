# cmake -DTARGET=FOLDER -P: the header core/kinds.hpp, where nothing is built (scripts/check_headers.sh).
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/cuda_instances.cmake)
kvant_cuda_write_kinds(${CMAKE_CURRENT_LIST_DIR}/../src/core ${TARGET})
