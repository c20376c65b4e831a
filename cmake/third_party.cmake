# Libraries that are header-only for us, so that an installed kvant needs Threads only, and OpenMP where it was built
# with it. A system's own package comes first; without one, the copy in third_party/ that a source distribution carries
# (scripts/third_party.sh made it; a checkout has none).
function(kvant_header_library package target header)
  find_package(${package} QUIET)
  if(TARGET ${target})
    return()
  endif()
  set(carried ${PROJECT_SOURCE_DIR}/third_party/${package}/include)
  if(NOT EXISTS ${carried}/${header})
    message(FATAL_ERROR "kvant needs ${package}: "
      "install its headers (Debian: libfmt-dev nlohmann-json3-dev libcli11-dev libxxhash-dev), "
      "or point ${package}_DIR at its CMake package")
  endif()
  add_library(${target} INTERFACE IMPORTED)
  target_include_directories(${target} INTERFACE ${carried})
  message(STATUS "kvant: ${package} from third_party/")
endfunction()

kvant_header_library(fmt fmt::fmt-header-only fmt/format.h)
set_property(TARGET fmt::fmt-header-only APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS FMT_HEADER_ONLY=1)
kvant_header_library(nlohmann_json nlohmann_json::nlohmann_json nlohmann/json.hpp)
# xxHash is one header here (XXH_INLINE_ALL), for which Debian has no CMake package. A copy of it alone is on the path
# of the compiler, since the header lies among those of a system, which a cross-compiler must not see.
find_path(KVANT_XXHASH_INCLUDE xxhash.h
  HINTS ${PROJECT_SOURCE_DIR}/third_party/xxHash/include NO_CMAKE_FIND_ROOT_PATH)
if(NOT KVANT_XXHASH_INCLUDE)
  message(FATAL_ERROR "kvant needs the header of xxHash 0.8: install it (Debian: libxxhash-dev), "
    "or set KVANT_XXHASH_INCLUDE to its folder")
endif()
configure_file(${KVANT_XXHASH_INCLUDE}/xxhash.h ${PROJECT_BINARY_DIR}/xxHash/xxhash.h COPYONLY)
add_library(xxHash::xxhash_header INTERFACE IMPORTED)
target_include_directories(xxHash::xxhash_header INTERFACE ${PROJECT_BINARY_DIR}/xxHash)
if(KVANT_BUILD_CLI)
  kvant_header_library(CLI11 CLI11::CLI11 CLI/CLI.hpp)
endif()

# Eigen is for calibration alone: sets KVANT_CALIBRATE_FOUND.
set(KVANT_CALIBRATE_FOUND OFF)
if(NOT KVANT_CALIBRATE MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVANT_CALIBRATE is \"${KVANT_CALIBRATE}\": must be ON, OFF or AUTO")
endif()
if(NOT KVANT_CALIBRATE STREQUAL "OFF")
  find_package(Eigen3 QUIET NO_MODULE)
  if(TARGET Eigen3::Eigen)
    set(KVANT_CALIBRATE_FOUND ON)
  elseif(KVANT_CALIBRATE STREQUAL "ON")
    message(FATAL_ERROR "calibration needs Eigen 3: install it (Debian: libeigen3-dev), "
      "or configure with -DKVANT_CALIBRATE=OFF")
  endif()
endif()
if(NOT KVANT_CALIBRATE_FOUND)
  message(STATUS "kvant: without calibration (KVANT_CALIBRATE=${KVANT_CALIBRATE})")
endif()
