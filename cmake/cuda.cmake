# The CUDA backend: sets KVANT_CUDA_FOUND. Needs nvcc and the static runtime, nothing of a driver: cudart loads libcuda
# when it is first asked for a device, so that a build with CUDA also runs on machines that have none.
set(KVANT_CUDA_FOUND OFF)
if(NOT KVANT_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVANT_CUDA is \"${KVANT_CUDA}\": must be ON, OFF or AUTO")
endif()
if(KVANT_CUDA STREQUAL "OFF")
  message(STATUS "kvant: without the CUDA backend (KVANT_CUDA=OFF)")
  return()
endif()

# Before enable_language, which would set a default of its own. "-real": machine code only; a device that none of it
# fits is refused with a sentence (src/cuda/registry.cpp). "90-virtual" adds PTX, which the driver of a newer device
# compiles when a kernel is first used: minutes, once (the driver keeps the result), and so by request only.
set(CMAKE_CUDA_ARCHITECTURES)
foreach(architecture IN LISTS KVANT_CUDA_ARCHITECTURES)
  if(architecture MATCHES "^[0-9]+-virtual$")
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture})
  elseif(architecture MATCHES "^[0-9]+[af]?$")
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture}-real)
  else()
    message(FATAL_ERROR "KVANT_CUDA_ARCHITECTURES has \"${architecture}\": "
      "write compute capabilities as 80;89;90a;90-virtual")
  endif()
endforeach()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(KVANT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVANT_CUDA=ON, but there is no nvcc: "
      "put it on PATH, set CUDACXX, or configure with KVANT_CUDA=OFF")
  endif()
  message(STATUS "kvant: without the CUDA backend (no nvcc found; -DKVANT_CUDA=ON makes that an error)")
  return()
endif()
if(kvant_cuda_fast_math)
  message(FATAL_ERROR "CMAKE_CUDA_FLAGS has --use_fast_math or a part of it "
    "(-ftz=true, -prec-div=false, -prec-sqrt=false), "
    "which changes what kvant computes and cannot be taken back for its files: "
    "give the flag to your own targets (target_compile_options), or set KVANT_CUDA=OFF")
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(CUDAToolkit_VERSION VERSION_LESS 12.4)
  message(FATAL_ERROR "nvcc ${CUDAToolkit_VERSION}: kvant needs CUDA 12.4 or newer for C++20; "
    "or configure with KVANT_CUDA=OFF")
endif()
# CMake 3.25.1 (bookworm) does not know yet that nvcc has C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(KVANT_CUDA_FOUND ON)
message(STATUS "kvant: with the CUDA backend (nvcc ${CUDAToolkit_VERSION}, ${KVANT_CUDA_ARCHITECTURES})")
