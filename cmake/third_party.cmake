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
      "install its headers (Debian: libfmt-dev nlohmann-json3-dev libcli11-dev), "
      "or point ${package}_DIR at its CMake package")
  endif()
  add_library(${target} INTERFACE IMPORTED)
  target_include_directories(${target} INTERFACE ${carried})
  message(STATUS "kvant: ${package} from third_party/")
endfunction()

kvant_header_library(fmt fmt::fmt-header-only fmt/format.h)
set_property(TARGET fmt::fmt-header-only APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS FMT_HEADER_ONLY=1)
kvant_header_library(nlohmann_json nlohmann_json::nlohmann_json nlohmann/json.hpp)
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
