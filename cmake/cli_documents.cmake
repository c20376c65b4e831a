# The manual page and the shells' completions: the tool writes them from what it tells CLI11, so that they have every
# option that it has.
if(NOT TARGET kvant-cli)
  return()
endif()
if(CMAKE_CROSSCOMPILING)
  message(STATUS "kvant: no manual page and no shell completions: "
    "the tool, which writes them, does not run on this machine")
  return()
endif()
set(kvant_documents ${PROJECT_BINARY_DIR}/documents)
set(kvant_bash ${kvant_documents}/kvant)  # bash looks for a file of the command's name, zsh for _kvant
set(kvant_zsh ${kvant_documents}/_kvant)
set(kvant_fish ${kvant_documents}/kvant.fish)
set(kvant_man ${kvant_documents}/kvant.1)
file(MAKE_DIRECTORY ${kvant_documents})
add_custom_command(OUTPUT ${kvant_bash} ${kvant_zsh} ${kvant_fish} ${kvant_man}
  COMMAND kvant-cli completion bash -o ${kvant_bash}
  COMMAND kvant-cli completion zsh -o ${kvant_zsh}
  COMMAND kvant-cli completion fish -o ${kvant_fish}
  COMMAND kvant-cli man -o ${kvant_man}
  DEPENDS kvant-cli COMMENT "Manual page and shell completions" VERBATIM)
add_custom_target(kvant_documents ALL DEPENDS ${kvant_bash} ${kvant_zsh} ${kvant_fish} ${kvant_man})
install(FILES ${kvant_bash} DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES ${kvant_zsh} DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES ${kvant_fish} DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
install(FILES ${kvant_man} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
