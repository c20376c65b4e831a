"""Decoding of long sequences on several GPUs: each has a part of every sequence's keys (decode context parallel).

    torchrun --nproc-per-node 2 examples/python/context_parallel.py                  # GPUs, NCCL
    torchrun --nproc-per-node 2 examples/python/context_parallel.py --device cpu     # processes, gloo

Blocks of 64 tokens go to the ranks in turn, as engines interleave them. In a step every rank attends with all query
heads to its own keys. One all-to-all then exchanges partial outputs with their log-sum-exp: a rank gets all partials of
its share of (sequence, head) rows, and kvant.merge adds them in rank order, so the result has the same bits each time.

Tensor parallelism needs no such code: a kv head and its query heads live on one GPU, in a cache of fewer kv_heads.
"""

import argparse
import os

import torch
import torch.distributed as dist

import kvant

BLOCK = 64
options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
options.add_argument("--shapes", default=None, help="batch x keys, for example 1x131072,16x32768")
options.add_argument("--format", default="tq4")
args = options.parse_args()
if "LOCAL_RANK" not in os.environ:
    options.error("torchrun starts the processes of this example; the two commands are in the text of --help")
if args.device == "cuda" and not torch.cuda.is_available():
    options.error("there is no CUDA device here: --device cpu runs the same in processes")
on_gpu = args.device == "cuda"
shapes = args.shapes or ("1x131072,16x32768" if on_gpu else "1x2048,3x1024")
q_heads, kv_heads, head_dim = (32, 8, 128) if on_gpu else (8, 2, 64)

dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}") if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)


def tokens_of(block, batch, count):
    """Keys and values of one block of all sequences; every rank can make every block."""
    generator = torch.Generator(device).manual_seed(block)
    shape = (2, batch, count, kv_heads, head_dim)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def filled(blocks, batch, keys):
    """Sequences with these blocks, and a plan. All pages are encoded: each block has the same bytes wherever it is."""
    held = max(sum(min(BLOCK, keys - BLOCK * block) for block in blocks), 1)
    cache = kvant.Cache(kv_heads=kv_heads, head_dim=head_dim, k=args.format, v=args.format, device=str(device),
                        sink_pages=0, tail_pages=0, k_centre="none", max_sequences=batch if on_gpu else 0,
                        max_sequence_tokens=held + BLOCK if on_gpu else 0,
                        capacity_tokens=batch * (held + 2 * BLOCK) if on_gpu else 0)
    sequences = [cache.sequence() for _ in range(batch)]
    for block in blocks:
        count = min(BLOCK, keys - BLOCK * block)
        k, v = tokens_of(block, batch, count)
        cache.reserve(sequences, count)
        cache.write(sequences, 0, k, v)
    # Whoever drops a sequence frees its pages.
    return sequences, cache.plan(sequences, q_heads=q_heads)


def timed(step):
    """Runs a step, then its time in us, from a CUDA graph: the median of nine samples of ten replays."""
    step()
    if not on_gpu:
        return float("nan")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    samples = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 100)
    return sorted(samples[1:])[4]


for shape in shapes.split(","):
    batch, keys = map(int, shape.split("x"))
    q = torch.randn((batch, q_heads, head_dim), generator=torch.Generator("cpu").manual_seed(0)).to(device)
    rows = batch * q_heads
    mine = range(rank, (keys + BLOCK - 1) // BLOCK, ranks)
    sequences, plan = filled(mine, batch, keys)
    # The lse of a row lies behind its output: one all-to-all takes both, and shares of rows need no packing.
    partial, gathered = (torch.empty((rows, head_dim + 1), device=device) for _ in range(2))
    lse = torch.empty((batch, q_heads), device=device)
    merged = torch.empty((rows // ranks, head_dim), device=device)

    def parallel_step():
        plan.run(0, q, partial[:, :head_dim].view(batch, q_heads, head_dim), lse=lse)
        partial[:, head_dim].copy_(lse.view(rows))
        dist.all_to_all_single(gathered, partial)
        from_ranks = gathered.view(ranks, rows // ranks, head_dim + 1)
        merged.copy_(kvant.merge([(part[:, :head_dim], part[:, head_dim]) for part in from_ranks])[0])

    time_parallel = timed(parallel_step)
    dist.barrier()
    single = torch.empty_like(q)
    whole, whole_plan = filled(range((keys + BLOCK - 1) // BLOCK), batch, keys)
    time_single = timed(lambda: whole_plan.run(0, q, single))
    expected = single.view(ranks, rows // ranks, head_dim)[rank]
    error = ((merged - expected).norm() / expected.norm()).reshape(1)
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if rank == 0:
        ratio = "" if not on_gpu else (f": {time_parallel:.1f} us on {ranks} GPUs, {time_single:.1f} us on one, "
                                       f"ratio {time_parallel / time_single:.2f}")
        print(f"{batch} x {keys} keys, {args.format}, {ranks} ranks{ratio}; relative difference {error.item():.1e}")
    assert error.item() < 1e-5, error.item()
dist.destroy_process_group()
