# `cmake --install BUILD --component kvant_core` gives headers, library and a package: find_package(kvant) -> kvant::core.
if(NOT TARGET kvant_core)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(kvant_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvant)
set_target_properties(kvant_core PROPERTIES EXPORT_NAME core)
install(TARGETS kvant_core kvant_warnings EXPORT kvantTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT kvant_core
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/core/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT kvant_core)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/kvant COMPONENT kvant_core)
install(EXPORT kvantTargets NAMESPACE kvant:: DESTINATION ${kvant_package_dir} COMPONENT kvant_core)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/kvantConfig.cmake.in ${PROJECT_BINARY_DIR}/kvantConfig.cmake
  INSTALL_DESTINATION ${kvant_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvantConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvantConfig.cmake ${PROJECT_BINARY_DIR}/kvantConfigVersion.cmake
  DESTINATION ${kvant_package_dir} COMPONENT kvant_core)
