# Stops unless the folder's project, added to this one, made its library's targets alone, no test
# and no find of GoogleTest.
function(require_only_the_library folder)
  get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
  get_property(subfolders DIRECTORY "${folder}" PROPERTY SUBDIRECTORIES)
  get_property(tests DIRECTORY "${folder}" PROPERTY TESTS)
  list(REMOVE_ITEM targets mezzo_compiled mezzo_compiled_cuda)
  if(NOT targets STREQUAL "mezzo" OR subfolders OR tests OR GTest_FOUND OR TARGET GTest::gtest)
    message(FATAL_ERROR "mezzo as a part of a project brought along more than its library: "
                        "targets ${targets}; folders ${subfolders}; tests ${tests}; "
                        "GoogleTest ${GTest_FOUND}")
  endif()
endfunction()
