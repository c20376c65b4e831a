# cmake -DFOLDER=.. -P: which kernels for devices the option KVANT_CUDA_PAIRS selects, and the files that are made for
# them, in FOLDER (cmake/cuda_instances.cmake). No nvcc is needed.
cmake_minimum_required(VERSION 3.22)
set(root ${CMAKE_CURRENT_LIST_DIR}/../..)

# Of a child of this script: a line of the list that is wrong.
if(DEFINED LINE)
  include(${root}/cmake/cuda_instances.cmake)
  cmake_language(EVAL CODE "${LINE}")
  return()
endif()

# Of a child of this script: reads the option and says what it selects.
if(DEFINED PAIRS)
  include(${root}/cmake/cuda_instances.cmake)
  kvant_cuda_select_pairs("${PAIRS}" selected)
  message(STATUS "${selected}")
  return()
endif()

function(select option)
  execute_process(COMMAND ${CMAKE_COMMAND} "-DPAIRS=${option}" -P ${CMAKE_CURRENT_FUNCTION_LIST_FILE}
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE error)
  string(REGEX REPLACE "^-- |\n$" "" output "${output}")
  string(REGEX REPLACE "[ \n]+" " " error "${error}")
  set(status ${status} PARENT_SCOPE)
  set(output ${output} PARENT_SCOPE)
  set(error "${error}" PARENT_SCOPE)
endfunction()

function(expect_pairs option expected)
  select("${option}")
  if(NOT status EQUAL 0 OR NOT output STREQUAL expected)
    message(SEND_ERROR "KVANT_CUDA_PAIRS=${option} selects \"${output}\" and not \"${expected}\" ${error}")
  endif()
endfunction()

function(expect_refused option)
  select("${option}")
  if(status EQUAL 0)
    message(SEND_ERROR "KVANT_CUDA_PAIRS=${option} is not refused")
  endif()
  foreach(text IN LISTS ARGN)
    string(FIND "${error}" "${text}" at)
    if(at EQUAL -1)
      message(SEND_ERROR "KVANT_CUDA_PAIRS=${option}: the error does not say \"${text}\": ${error}")
    endif()
  endforeach()
endfunction()

set(most_used tq6/tq4 tq4/tq4 tq6/tq6 tq8/tq8 f16/f16 bf16/bf16 fp8/fp8 tq5/tq5 tq8/tq4 tq5/tq4 tq3/tq3 tq2/tq2)
set(seldom_used tq8/tq3 tq4/tq3 tq4/tq2 bf16/tq4)
expect_pairs("default" "${most_used}")
expect_pairs("all" "${most_used};${seldom_used}")
expect_pairs("tq6/tq4" "tq6/tq4")
expect_pairs("tq4/tq4;tq6/tq4" "tq6/tq4;tq4/tq4")  # in the order of the list
expect_pairs("default;tq4/tq2" "${most_used};tq4/tq2")
expect_refused("" "KVANT_CUDA_PAIRS is empty")
expect_refused("tq4" "\"tq4\"" "default, all" "tq4/tq4")
expect_refused("tq2/tq6" "\"tq2/tq6\"" "src/cuda/instances.cmake")

# Kinds: their names, units and tables are made from one line each.
function(expect_line_refused line)
  execute_process(COMMAND ${CMAKE_COMMAND} "-DLINE=${line}" -P ${CMAKE_CURRENT_FUNCTION_LIST_FILE}
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE error)
  string(REGEX REPLACE "[ \n]+" " " error "${error}")
  if(status EQUAL 0 OR NOT error MATCHES "${ARGN}")
    message(SEND_ERROR "${line} is not refused with \"${ARGN}\": ${error}")
  endif()
endfunction()
expect_line_refused("kvant_cuda_tile_kind(prefill_new hooper)" "kind prefill_new has \"hooper\": write any or hopper")
expect_line_refused("kvant_cuda_decode_kind(decode_new 90 decode_new)" "kind decode_new has \"90\"")
expect_line_refused("kvant_cuda_besides(eight_warps tq8/tq4 128 2)
kvant_cuda_kernel_table(128 tq8/tq4 table)" "no kernel of four warps with 2 tiles")

function(expect_text file)
  file(READ ${FOLDER}/${file} text)
  foreach(expected IN LISTS ARGN)
    string(FIND "${text}" "${expected}" at)
    if(at EQUAL -1)
      message(SEND_ERROR "${file} does not have ${expected}:\n${text}")
    endif()
  endforeach()
endfunction()
function(expect_new_kinds)
  include(${root}/cmake/cuda_instances.cmake)
  list(LENGTH kvant_cuda_head_dims head_dims)
  kvant_cuda_decode_kind(decode_new hopper decode_new)
  kvant_cuda_tile_kind(prefill_new any)
  kvant_cuda_besides(new tq6/tq4 128 1,4)
  kvant_cuda_write_kinds(${root}/src/core ${FOLDER})
  kvant_cuda_write_instances(${root}/src/cuda ${FOLDER} "tq6/tq4" units hopper_units)
  expect_text(kinds.hpp
    "EACH_DECODE_KIND(X) X(decode_sm90, true) X(decode_sm80, false)" " X(decode_new, true)\n"
    "EACH_TILE_KIND(X) X(prefill_sm90, true) X(prefill_sm80, false)" " X(prefill_new, false)\n")
  expect_text(instances.hpp "X(prefill_new, 64)" "X(prefill_new, 512)" "X(prefill_sm90, 128)")
  expect_text(prefill_new_d128.cu "#include \"cuda/prefill_new/unit.cuh\"" "prefill_new_d128()"
    "prefill_new::add<Format::k, Format::v, 128>")
  expect_text(attend_d128.cu "#include \"cuda/decode/unit.cuh\"\n" "#include \"cuda/decode_new/unit.cuh\"\n"
    "new_entry<Format::tq6, Format::tq4, 128, 1>()" "new_entry<Format::tq6, Format::tq4, 128, 4>()")
  list(FILTER units INCLUDE REGEX "/prefill_new_d")
  list(LENGTH units count)
  if(NOT count EQUAL head_dims OR hopper_units MATCHES "prefill_new")
    message(SEND_ERROR "units of prefill_new: ${units}; ${hopper_units}")
  endif()
endfunction()
file(REMOVE_RECURSE ${FOLDER})
expect_new_kinds()

# The files: a kernel that is left out, and one that is not.
include(${root}/cmake/cuda_instances.cmake)
file(REMOVE_RECURSE ${FOLDER})
kvant_cuda_write_instances(${root}/src/cuda ${FOLDER} "tq6/tq4" units hopper_units)
file(READ ${FOLDER}/attend_d256.cu attend)
file(READ ${FOLDER}/instances.hpp header)
foreach(text "attend_entry<Format::tq6, Format::tq4, 256, 4>()"
        "eight_warps_entry<Format::tq6, Format::tq4, 256, 2>()" "decode_kernels<256>()")
  string(FIND "${attend}" "${text}" at)
  if(at EQUAL -1)
    message(SEND_ERROR "attend_d256.cu does not have ${text}:\n${attend}")
  endif()
endforeach()
file(READ ${FOLDER}/attend_d192v128.cu of_width)
foreach(text "attend_entry<Format::tq6, Format::tq4, 192128, 4>()" "decode_kernels<192128>()")
  string(FIND "${of_width}" "${text}" at)
  if(at EQUAL -1)
    message(SEND_ERROR "attend_d192v128.cu does not have ${text}:\n${of_width}")
  endif()
endforeach()
file(READ ${FOLDER}/latent_d512r64.cu of_latent)  # whatever pairs the option names
foreach(text "latent_entry<Format::tq8, Format::tq4, 1064512, false>()"
        "latent_entry<Format::tq8, Format::tq4, 1064512, true>()"
        "latent_entry<Format::bf16, Format::bf16, 1064512, false>()"
        "latent_columns_entry<Format::tq8, Format::tq4, 1064512, 4>()" "decode_kernels<1064512>()")
  string(FIND "${of_latent}" "${text}" at)
  if(at EQUAL -1)
    message(SEND_ERROR "latent_d512r64.cu does not have ${text}:\n${of_latent}")
  endif()
endforeach()
if(of_latent MATCHES "f16, 1064512, true>|attend_entry<")
  message(SEND_ERROR "latent_d512r64.cu has entries that latents do not have:\n${of_latent}")
endif()
foreach(text "EACH_OF_PREFILL_DENSE\\(X\\)[^\n]* X\\(192128\\)\n" "int prefill_dense\\[\\] = {64, [^\n]*, 192128};\n"
        "EACH_OF_UNPACK\\(X\\)[^\n]* X\\(512\\)\n" "EACH_OF_LATENT\\(X\\) X\\(1064512\\)\n"
        "int attend\\[\\] = {64, [^\n]*, 192128};\n")
  if(NOT header MATCHES "${text}")
    message(SEND_ERROR "instances.hpp does not have ${text}:\n${header}")
  endif()
endforeach()
if(NOT header MATCHES "EACH_UNEQUAL_WIDTH\\(X\\) +X\\(192128\\)\n" OR attend MATCHES "tq8" OR
   NOT header MATCHES "EACH_PAIR\\(X\\) X\\(tq6, tq4\\)\n" OR
   NOT header MATCHES "OTHER_PAIR\\(X\\) .*X\\(tq8, tq8\\)")
  message(SEND_ERROR "with tq6/tq4 alone:\n${attend}\n${header}")
endif()
list(LENGTH units count)
list(LENGTH hopper_units hopper_count)
list(LENGTH kvant_cuda_head_dims head_dims)
list(LENGTH kvant_cuda_widths widths)  # units of attention
list(LENGTH kvant_cuda_latents latents)
string(REGEX MATCHALL ", false" tile_kinds "${kvant_cuda_tile_kinds}")
string(REGEX MATCHALL ", true" hopper_tile_kinds "${kvant_cuda_tile_kinds}")
list(LENGTH tile_kinds tile_kinds)
list(LENGTH hopper_tile_kinds hopper_tile_kinds)
math(EXPR expected "(3 + ${tile_kinds}) * ${head_dims} + ${widths} + 2 * ${latents}")  # latents: decode and appends
math(EXPR hopper_expected "(1 + ${hopper_tile_kinds}) * ${head_dims} + ${widths}")
if(NOT count EQUAL expected OR NOT hopper_count EQUAL hopper_expected)
  message(SEND_ERROR "${count} and ${hopper_count} units for ${head_dims} head_dims")
endif()
