# install(), and the package that find_package(mezzo) reads.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(mezzo_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/mezzo")
install(TARGETS mezzo EXPORT mezzo-targets INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT mezzo-targets NAMESPACE mezzo:: DESTINATION "${mezzo_package_dir}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/mezzo" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/mezzo-config.cmake.in"
  "${PROJECT_BINARY_DIR}/mezzo-config.cmake" INSTALL_DESTINATION "${mezzo_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/mezzo-config-version.cmake"
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/mezzo-config.cmake" "${PROJECT_BINARY_DIR}/mezzo-config-version.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/MezzoTorch.cmake" "${PROJECT_SOURCE_DIR}/cmake/MezzoCuda.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/MezzoCompiled.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/MezzoMpi.cmake" "${PROJECT_SOURCE_DIR}/cmake/MezzoNccl.cmake"
        DESTINATION "${mezzo_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/mezzo")
