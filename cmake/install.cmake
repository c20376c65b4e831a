# Install rules: the library, the public headers, find_package(kvant) and pkg-config. Installed only for a top-level
# build or on request, so that a project that vendors kvant does not install it by accident.
option(KVANT_INSTALL "Install kvant" ${PROJECT_IS_TOP_LEVEL})
if(NOT KVANT_INSTALL)
  return()
endif()
if(KVANT_PYTHON)  # into the folder of the Python package: the library, and the tool beside it in bin/
  install(TARGETS kvant kvant-cli LIBRARY DESTINATION . COMPONENT python RUNTIME DESTINATION bin COMPONENT python)
  return()
endif()
include(CMakePackageConfigHelpers)

install(TARGETS kvant EXPORT kvantTargets)
install(DIRECTORY include/kvant DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
include(cmake/cli_documents.cmake)

set(kvant_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvant)
install(EXPORT kvantTargets NAMESPACE kvant:: DESTINATION ${kvant_cmake_dir})
configure_package_config_file(cmake/kvantConfig.cmake.in ${PROJECT_BINARY_DIR}/kvantConfig.cmake
  INSTALL_DESTINATION ${kvant_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvantConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvantConfig.cmake ${PROJECT_BINARY_DIR}/kvantConfigVersion.cmake
  DESTINATION ${kvant_cmake_dir})

# A static library passes on what it needs; a shared one has it inside.
set(kvant_pc_libs "-pthread")
if(KVANT_OPENMP)
  string(APPEND kvant_pc_libs " ${OpenMP_CXX_FLAGS}")
endif()
foreach(library IN LISTS kvant_runtime)
  string(APPEND kvant_pc_libs " -l${library}")
endforeach()
if(KVANT_CUDA_FOUND)
  string(APPEND kvant_pc_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
configure_file(cmake/kvant.pc.in ${PROJECT_BINARY_DIR}/kvant.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kvant.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
