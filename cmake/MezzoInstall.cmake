# The install rules, the CMake package and the Debian package.

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
              "${PROJECT_SOURCE_DIR}/cmake/MezzoGloo.cmake"
        DESTINATION "${mezzo_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/mezzo")

# `cpack` in the build directory makes libmezzo-dev_VERSION_all.deb. Debian has no libtorch that is new enough, so the package does not
# depend on one: mezzo-config.cmake finds it, or stops with a message.
if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_GENERATOR DEB)
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  string(REGEX REPLACE "^https://([^/]+)/([^/]+)/.*$" "\\2@users.noreply.\\1" mezzo_mail "${PROJECT_HOMEPAGE_URL}")
  set(CPACK_PACKAGE_CONTACT "The authors of mezzo <${mezzo_mail}>")
  set(CPACK_DEBIAN_PACKAGE_HOMEPAGE "${PROJECT_HOMEPAGE_URL}")
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "g++ (>= 4:12) | clang (>= 1:14)")
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
  set(CPACK_DEBIAN_PACKAGE_NAME libmezzo-dev)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE all)
  set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
  set(CPACK_DEBIAN_PACKAGE_SUGGESTS "cmake (>= 3.25)")
  include(CPack)
endif()
