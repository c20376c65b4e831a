# The one list of what is compiled for devices. cmake/cuda_instances.cmake makes from this list the units of attention
# and of appends, a .cu file each for every head_dim, and cuda/instances.hpp, from which C++ has the set of head_dims
# and pairs and the texts of refusals.
#
# A column tile is four query rows (heads of a group times queries): kernels of 1, 2 and 4 tiles take up to 4, 8 and 16
# rows at once. Where a kernel is missing the next larger serves, which costs some idle columns: the plan says which.
# Every pair needs a kernel of 4.

# kvant_cuda_head_dim(HEAD_DIM TILES): `most` or `few` of the tiles of each pair, by how often models have it.
# What a kernel cannot do it refuses when it is compiled (static_assert).
kvant_cuda_head_dim(64 few)
kvant_cuda_head_dim(96 few)
kvant_cuda_head_dim(128 most)
kvant_cuda_head_dim(192 few)
kvant_cuda_head_dim(256 most)
kvant_cuda_head_dim(512 most)

# kvant_cuda_width(KEYS/VALUES TILES): keys and values of different head_dims, both of which have a line above.
kvant_cuda_width(192/128 few)

# kvant_cuda_latent(LATENT+ROPE ROTARY/LATENT,..): latents and rotary keys (multi-head latent attention), and pairs of
# formats with a kernel for 9.0a. Both head_dims have a line above. Other pairs have the generic kernel.
kvant_cuda_latent(512+64 tq8/tq4,tq8/tq6,tq8/tq8,tq8/tq5,tq4/tq4,fp8/fp8,bf16/bf16,f16/f16)

# kvant_cuda_pair(KEYS/VALUES WHEN MOST_TILES FEW_TILES), WHEN: by `default`, or when `named` by KVANT_CUDA_PAIRS. The
# most used pairs come first.
kvant_cuda_pair(tq6/tq4 default 1,2,4 1,4)  # the default pair
kvant_cuda_pair(tq4/tq4 default 1,2,4 1,4)
kvant_cuda_pair(tq6/tq6 default 1,2,4 1,4)
kvant_cuda_pair(tq8/tq8 default 1,2,4 1,4)
kvant_cuda_pair(f16/f16 default 1,2,4 1,4)
kvant_cuda_pair(bf16/bf16 default 1,2,4 1,4)
kvant_cuda_pair(fp8/fp8 default 1,2,4 1,4)
kvant_cuda_pair(tq5/tq5 default 1,4 1,4)
kvant_cuda_pair(tq8/tq4 default 1,4 1,4)
kvant_cuda_pair(tq5/tq4 default 1,4 4)
kvant_cuda_pair(tq3/tq3 default 1,2,4 4)
kvant_cuda_pair(tq2/tq2 default 4 4)
kvant_cuda_pair(tq8/tq3 named 1,4 4)
kvant_cuda_pair(tq4/tq3 named 1,4 4)
kvant_cuda_pair(tq4/tq2 named 1,4 4)
kvant_cuda_pair(bf16/tq4 named 1,4 4)

# Below, HEAD_DIM may be that of keys and values, as in 192/128.

# kvant_cuda_decode_kind(NAME WHERE FOLDER): a kind of decode kernels for several queries, which round weights: faster
# and less exact. WHERE: `hopper` has code for 9.0a alone. FOLDER/unit.cuh has the entries of the kernels, whose shapes
# have kKind = DecodeKind::NAME, and plan/kinds/NAME.cpp their times (plan/decode_kinds.hpp).
kvant_cuda_decode_kind(decode_sm90 hopper decode)
kvant_cuda_decode_kind(decode_sm80 any decode)

# kvant_cuda_besides(WAY KEYS/VALUES HEAD_DIM TILES): kernels besides, where they were seen to pay. WAY_entry() of
# a unit.cuh makes their entries in a table.

# Kernels of eight warps for short work (decode/eight_warps.cuh).
kvant_cuda_besides(eight_warps tq6/tq4 128 1)
kvant_cuda_besides(eight_warps tq4/tq4 128 1)
kvant_cuda_besides(eight_warps tq6/tq4 256 2,4)
kvant_cuda_besides(eight_warps tq4/tq4 256 2,4)
kvant_cuda_besides(eight_warps tq6/tq4 512 1,2,4)
kvant_cuda_besides(eight_warps tq4/tq4 512 1,2,4)
kvant_cuda_besides(eight_warps tq8/tq8 512 2)

# Kernels in which keys and values of a page take turns in one stage of shared memory. They are for pairs of which no
# kernel with a stage for each side fits the 99 KiB that a block gets on compute capability 8.6, 8.9 and 12.x.
foreach(pair f16/f16 bf16/bf16)
  kvant_cuda_besides(one_stage ${pair} 96 1,4)
  kvant_cuda_besides(one_stage ${pair} 192 1,4)
  kvant_cuda_besides(one_stage ${pair} 512 1,2)
endforeach()

# decode_sm80: weights are halves (Way::half_weights in decode/shape.hpp). 4 and 8 tiles are 16 and 32 rows.
# (Of tq6's 192 channels no four warps can share a page.)
kvant_cuda_besides(half_weights tq4/tq4 192/128 8)
kvant_cuda_besides(half_weights tq8/tq8 192/128 8)
foreach(pair tq6/tq4 tq4/tq4 tq8/tq8)
  kvant_cuda_besides(half_weights ${pair} 128 8)
  kvant_cuda_besides(half_weights ${pair} 256 4,8)
endforeach()

# decode_sm90: kernels whose blocks are warpgroups: 4 and 8 tiles, which are 16 and 32 rows (decode/group.cuh), and 16
# (decode/tile_block.cuh).
kvant_cuda_besides(group tq6/tq4 128 4,8,16)
kvant_cuda_besides(group tq4/tq4 128 4,8,16)

# Latents: up to 16 rows at once (decode_latent/columns.cuh), for devices whose blocks get 203 KiB of shared memory.
kvant_cuda_besides(latent_columns tq8/tq4 512+64 4)

# kvant_cuda_unit(TEMPLATE NAME WHERE EACH): units NAME_dN.cu made from TEMPLATE, one for each head_dim and, where EACH
# is `widths`, for each of kvant_cuda_width; where EACH is `latents`, for each of kvant_cuda_latent alone. `hopper`:
# kernels that are compiled for 9.0a alone; `any`: others. The units that take longest to compile come first.
kvant_cuda_unit(decode/attend attend any widths)
kvant_cuda_unit(decode_latent/latent latent any latents)
kvant_cuda_unit(append/append append any head_dims)
kvant_cuda_unit(append/append append_latents any latents)
# kvant_cuda_tile_kind(NAME WHERE): a kind of prefill kernels that read pages, with a unit for each head_dim
# (prefill/tiles.cu.in). NAME/unit.cuh has its kernels, and plan/kinds/NAME.cpp its limits and times
# (plan/tile_kinds.hpp). The option "prefill" takes the first kind that serves.
kvant_cuda_tile_kind(prefill_sm90 hopper)
kvant_cuda_tile_kind(prefill_sm80 any)
kvant_cuda_unit(prefill_unpacked/unpack unpack any head_dims)
kvant_cuda_unit(prefill_dense/dense prefill_dense hopper widths)
