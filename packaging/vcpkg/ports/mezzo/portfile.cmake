# An overlay port that installs this checkout:
#   vcpkg install mezzo --overlay-ports=MEZZO/packaging/vcpkg/ports
# libtorch is not a dependency: vcpkg's is too old.
set(VCPKG_BUILD_TYPE release)  # header-only

get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DMEZZO_BUILD_TESTS=OFF -DMEZZO_BUILD_EXAMPLES=OFF -DMEZZO_USE_MPI=OFF -DCMAKE_INSTALL_DATADIR=share)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/mezzo)
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/lib" "${CURRENT_PACKAGES_DIR}/share/licenses")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
