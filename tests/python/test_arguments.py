"""Numbers, names and flags at the boundary: what C cannot be given as it is gets a sentence with the argument's name,
and nothing has changed."""

import copy
import ctypes
import itertools
import pickle

import numpy as np
import pytest

import kvant

D = 64
BIG = 2**32


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def cache():
    return kvant.Cache(kv_heads=2, head_dim=D, layers=2, k="f32", v="f32")


@pytest.fixture
def sequence(cache):
    s = cache.sequence()
    for layer in range(2):
        s.append(layer, ones(10, 2), ones(10, 2))
    return s


@pytest.fixture
def pages():
    return kvant.Pages(kv_heads=2, head_dim=D, k_centre="none")


def ones(tokens, heads):
    return np.ones((tokens, heads, D), np.float32)


def aligned_pool(pages, blocks):
    raw = np.zeros(blocks * 2 * pages.block_bytes + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + blocks * 2 * pages.block_bytes].reshape(blocks, 2, pages.block_bytes)


def refused(match):
    return pytest.raises(kvant.InvalidArgument, match=match)


# --- whole numbers ----------------------------------------------------------------------------------------------------

COUNTS = "layers kv_heads head_dim sink_pages tail_pages window window_sinks rollback_tokens capacity_tokens " \
         "max_sequences max_sequence_tokens threads"
TOO_LARGE = [2**64 + 1, 2**63, -(2**63) - 1, 10**5000]
NOT_NUMBERS = [1.0, 1.5, "1", b"1", True, np.True_, np.float32(1), [1], np.array([1, 2]), object(), 1j]


@pytest.mark.parametrize("name", COUNTS.split())
@pytest.mark.parametrize("value", [*TOO_LARGE, *NOT_NUMBERS], ids=lambda v: type(v).__name__)
def test_counts_of_a_cache(name, value):
    with refused(f"^{name} = "):
        kvant.Cache(**{"kv_heads": 2, "head_dim": D, name: value})


@pytest.mark.parametrize(
    "name", ["sink_pages", "tail_pages", "capacity_tokens", "max_sequences", "max_sequence_tokens"]
)
def test_negative_counts_are_not_the_default(name, cache, sequence, tmp_path):
    with refused(f"^{name} = -1: must be 0 to"):
        kvant.Cache(**{"kv_heads": 2, "head_dim": D, name: -1})
    kvant.save(cache, tmp_path / "a.kvs")
    if "pages" not in name:
        with refused(f"^{name} = -1: must be 0 to"):
            kvant.load(tmp_path / "a.kvs", **{name: -1})


def test_a_list_has_an_item_for_each_sequence_or_is_left_out(cache, sequence, tmp_path):
    path, ids = tmp_path / "a.kvs", list(range(10))
    kvant.save(cache, path, tokens=[ids])
    other = cache.sequence()
    for tokens in ([], [ids, [], []], ids):
        with refused("^tokens"):
            kvant.save(cache, tmp_path / "b.kvs", tokens=tokens)
    for tokens in ([], [ids, ids]):
        with refused("^tokens has"):
            kvant.save(cache, tmp_path / "b.kvs", sequences=[sequence], tokens=tokens)
        for options in ({}, {"sequences": [0]}, {"into": cache}):
            with refused("^tokens has"):
                kvant.load(path, tokens=tokens, **options)
    for tokens in ([[]], [None], [ids[:9]]):
        with refused("10 token ids"):
            kvant.load(path, tokens=tokens)
    with refused("^tokens has more than 0 "):
        kvant.load(path, tokens=[ids], sequences=[])
    assert not (tmp_path / "b.kvs").exists() and cache.owner.count() == 2
    other.remove()
    kvant.save(cache, tmp_path / "b.kvs", tokens=[ids])
    assert kvant.load(tmp_path / "b.kvs", tokens=[], sequences=[]).sequences == []


def test_numbers_that_do_not_fit_are_refused_everywhere(cache, sequence, pages):
    pool, tables = aligned_pool(pages, 2), ([[0]], [1], [0, 1])
    pages_plan = pages.plan(4, max_batch=1, max_blocks=2)
    two = [sequence, cache.sequence()]
    calls = {
        "layer": [
            lambda: cache.attend(sequence, BIG, ones(1, 4)),
            lambda: cache.plan(sequence, q_heads=4).run(BIG, ones(1, 4)),
            lambda: cache.decode(sequence, BIG),
            lambda: cache.write([sequence], BIG, ones(1, 2), ones(1, 2)),
            lambda: sequence.append(BIG, ones(1, 2), ones(1, 2)),
            lambda: pages.write(pool, ones(1, 2), ones(1, 2), [0], layer=BIG),
            lambda: pages_plan.run(pool, ones(1, 4), layer=BIG),
        ],
        "q_heads": [
            lambda: cache.plan(sequence, q_heads=BIG + 4),
            lambda: pages.plan(BIG + 4, max_batch=1, max_blocks=1),
        ],
        "q_len": [lambda: cache.plan(sequence, q_heads=4, q_len=BIG + 1)],
        r"q_lens\[0\]": [lambda: cache.plan(sequence, q_heads=4, q_lens=[BIG + 1])],
        "window": [lambda: cache.plan(sequence, q_heads=4, window=2**64 + 5)],
        "window_sinks": [lambda: cache.plan(sequence, q_heads=4, window=5, window_sinks=2**64)],
        "split_keys": [lambda: cache.plan(sequence, q_heads=4, split_keys=2**64 + 64)],
        "mask_first_key": [lambda: cache.plan(sequence, q_heads=4, mask=np.ones((1, 10), bool), mask_first_key=2**64)],
        "tokens": [lambda: sequence.truncate(2**64), lambda: cache.reserve([sequence], 2**64 + 1)],
        r"tokens\[1\]": [lambda: cache.reserve(two, [1, 2**64 + 1]), lambda: cache.step(two, [1, 2**64])],
        r"parents\[0\]": [lambda: cache.reorder(two, [2**64, 0])],
        "begin": [lambda: cache.decode(sequence, 0, begin=2**64)],
        "end": [lambda: cache.decode(sequence, 0, end=2**64 + 3)],
        r"slot_mapping\[0\]": [lambda: pages.write(pool, ones(1, 2), ones(1, 2), [2**64 + 65])],
        r"block_ids\[0\]": [lambda: pages.decode(pool, [BIG], ones(64, 2), None)],
        r"to_ids\[1\]": [lambda: pages.copy(pool, [0, 0], [1, BIG + 1])],
        r"seq_lens\[0\]": [lambda: pages_plan.set_tables(np.zeros((1, 1), np.int32), [BIG + 1], [0, 1])],
        "max_batch": [lambda: pages.plan(4, max_batch=BIG + 1, max_blocks=1)],
        "max_blocks": [lambda: pages.plan(4, max_batch=1, max_blocks=2**64 + 1)],
        "tail_sequences": [lambda: kvant.Pages(kv_heads=2, head_dim=D, tail_pages=1, tail_sequences=BIG + 1)],
        r"basis_layers\[0\]": [lambda: kvant.Cache(kv_heads=2, head_dim=D, basis_layers=[BIG])],
    }
    del tables
    for name, those in calls.items():
        for call in those:
            with refused(f"^{name} = "):
                call()
    assert len(sequence) == 10


def test_every_integer_type_is_a_number(cache, sequence):
    for integer in (np.int8, np.uint16, np.int32, np.uint64, np.array, int):
        four, one = integer(4), integer(1)
        plan = cache.plan(sequence, q_heads=four, q_len=one, window=four, threads=one)
        assert plan.run(integer(0), ones(1, 4)).shape == (1, 4, D)
    torch = pytest.importorskip("torch")
    cache.plan([sequence], q_heads=torch.tensor(4), q_lens=torch.tensor([1]))
    cache.plan([sequence], q_heads=np.int64(4), q_lens=np.array([1], np.uint8))


NOT_TOKENS = [[1.5], [1, 2], [], "1", b"1", {1: 2}, {1}, None, 1.0, [None], ["1"], [True], itertools.count()]


@pytest.mark.parametrize("tokens", NOT_TOKENS)
def test_tokens_of_a_step_are_whole_numbers(cache, sequence, tokens):
    for call in (cache.reserve, cache.step, cache.reserve_ahead, cache.advance):
        with refused("^tokens"):
            call([sequence], tokens)
    assert len(sequence) == 10


# --- names, flags, numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"k": "tq4\0x"}, {"v": "tq4\0"}, {"k": b"tq4"}, {"v": None}, {"v": 4}, {"k": ""}, {"k": "tq4\u2009"},
        {"isa": "avx2\0x"}, {"isa": 2}, {"isa": ""}, {"exact": "f8"}, {"exact": 1}, {"exact": ["f32"]},
        {"k_basis": "nowhere"}, {"k_basis": None}, {"v_basis": 2}, {"k_centre": "Page"}, {"k_centre": {}},
        {"pinned": "yes"}, {"pinned": None}, {"pinned": 2}, {"bases": 5}, {"bases": ""}, {"bases": "a\0b"},
        {"device": "cpu:3"}, {"device": "cuda:-1"}, {"device": "cuda:"}, {"device": "cuda: 1"}, {"device": "tpu"},
        {"device": 0}, {"device": "cuda:1_0"}, {"device": "cuda:99999999999"}, {"device": "CPU"},
    ],
    ids=lambda o: repr(o)[:40],
)  # fmt: skip
def test_names_of_a_cache(options):
    (name,) = options
    with refused(f"^{name} = "):
        kvant.Cache(kv_heads=2, head_dim=D, **options)
    if name in ("k", "v", "isa", "exact", "device"):
        with refused(f"^{name} = "):
            kvant.Pages(kv_heads=2, head_dim=D, **options)


@pytest.mark.parametrize("text, number", [("32k", 32768), ("1M", 1 << 20)])
def test_short_numbers_are_written_out(text, number):
    with refused(f'^capacity_tokens = "{text}": must be a whole number .*; write {number}$'):
        kvant.Cache(kv_heads=2, head_dim=D, capacity_tokens=text)
    for other in ("32", "k", "3.5k", "32kb"):
        with refused("must be a whole number .an int., not a str$"):
            kvant.Cache(kv_heads=2, head_dim=D, capacity_tokens=other)


def test_suggestions_are_of_the_arguments_own_kind():
    torch = pytest.importorskip("torch")
    for name in ("bfloat16", torch.bfloat16):
        with refused('must be one of f32, f16, bf16; write "bf16"$'):
            kvant.Cache(kv_heads=2, head_dim=D, exact=name)
    with refused("must be one of automatic, none, page$"):
        kvant.Cache(kv_heads=2, head_dim=D, k_centre="float32")
    with refused("must be one of f32, f16, bf16$"):
        kvant.Cache(kv_heads=2, head_dim=D, exact="f8")
    with refused("must be one of f32, f16, bf16$"):
        kvant.Pages(kv_heads=2, head_dim=D, tail_pages=1, tail_sequences=1, exact="bool")


def test_the_host_is_one_device():
    for device in (None, "cpu", "cpu:0"):
        assert kvant.Cache(kv_heads=2, head_dim=D, device=device).device == ("cpu", 0)
    torch = pytest.importorskip("torch")
    assert kvant.Cache(kv_heads=2, head_dim=D, device=torch.device("cpu")).device == ("cpu", 0)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": "False"}, {"is_causal": None}, {"is_causal": 2}, {"is_causal": np.array([True, False])},
        {"fresh_keys": "no"},
        {"scale": "0.1"}, {"scale": 0}, {"scale": 0.0}, {"scale": 1j}, {"scale": [1.0]}, {"scale": True},
        {"softcap": None}, {"softcap": "5"}, {"softcap": 10**400}, {"alibi_slopes": 1.0}, {"alibi_slopes": [1, 2, 3]},
        {"alibi_slopes": itertools.repeat(1.0)}, {"alibi_slopes": [1, 2, 3, "4"]}, {"alibi_slopes": [1, 2, 3, 1e39]},
        {"alibi_slopes": [1, 2, 3, float("nan")]}, {"isa": "avx2\0x"},
        {"kernel": 5}, {"kernel": {}}, {"kernel": np.zeros(0)}, {"kernel": "decode\0"},
        {"window": 1.5}, {"window": "5"}, {"threads": None}, {"q_heads": None}, {"q_heads": 4.0},
    ],
    ids=lambda o: repr(o)[:40],
)  # fmt: skip
def test_options_of_plans(cache, sequence, pages, options):
    (name,) = options
    with refused(f"^{name}"):
        cache.plan(sequence, **{"q_heads": 4, **options})
    with refused(f"^{name}"):
        pages.plan(**{"q_heads": 4, "max_batch": 1, "max_blocks": 1, **options})
    if name != "q_heads":
        with refused(f"^{name}"):
            cache.attend(sequence, 0, ones(1, 4), **options)


@pytest.mark.parametrize("sequences", [None, 5, "abc", [5], [None], object()], ids=repr)
def test_what_is_not_a_sequence(cache, sequences):
    calls = [
        lambda: cache.attend(sequences, 0, ones(1, 4)),
        lambda: cache.plan(sequences, q_heads=4),
        lambda: cache.write(sequences, 0, ones(1, 2), ones(1, 2)),
        lambda: cache.reserve(sequences, 1),
        lambda: cache.step(sequences, 1),
        lambda: cache.decode(sequences, 0),
        lambda: cache.reorder(sequences, [0]),
    ]
    for call in calls:
        with refused("^sequences"):
            call()


@pytest.mark.parametrize(
    "x",
    [None, 5, "abc", [[[1.0]]], object(), b"1234", np.float32(1), np.ones(3), ones(1, 4)[..., 0]],
    ids=lambda x: type(x).__name__,
)
def test_what_is_not_a_tensor(cache, sequence, pages, x):
    pool, good = aligned_pool(pages, 2), ones(1, 2)
    calls = {
        "q": [lambda: cache.attend(sequence, 0, x), lambda: cache.plan(sequence, q_heads=4).run(0, x)],
        "keys": [lambda: sequence.append(0, x, good), lambda: pages.write(pool, x, good, [0])],
        "values": [lambda: sequence.append(0, good, x), lambda: pages.write(pool, good, x, [0])],
        "pool": [lambda: pages.write(x, good, good, [0])],
    }
    for name, those in calls.items():
        for call in those:
            with refused(f"^{name}"):
                call()
    if x is not None:
        with refused("^out"):
            cache.attend(sequence, 0, ones(1, 4), out=x)
        with refused("^mask"):
            cache.attend(sequence, 0, ones(1, 4), mask=np.array(x) if x is None else x)
    assert len(sequence) == 10


@pytest.mark.parametrize(
    "partials",
    [None, 5, [], [1], [(1, 2)], [(np.ones((2, 4)),)], [("a", "b")], [(np.ones((2, 4), complex), np.ones(2))],
     [(np.float32(1), np.float32(1))]],
    ids=repr,
)  # fmt: skip
def test_what_is_not_a_partial(partials):
    with refused("^partials"):
        kvant.merge(partials)


def test_a_stream_is_a_devices(cache, sequence, pages, tmp_path):
    path, x = tmp_path / "a.kvs", ones(1, 2)
    kvant.save(cache, path)
    plan, pool = cache.plan(sequence, q_heads=4), aligned_pool(pages, 2)
    pages_plan, tables = pages.plan(4, max_batch=1, max_blocks=2), (np.zeros((1, 1), np.int32), [1], [0, 1])
    calls = [
        lambda: cache.attend(sequence, 0, ones(1, 4), stream=5),
        lambda: cache.attend(sequence, 0, ones(1, 4), x, x, stream=5),
        lambda: cache.reserve([sequence], 1, stream=5),
        lambda: cache.step([sequence], 1, stream=5),
        lambda: cache.reserve_ahead([sequence], 1, stream=5),
        lambda: cache.write([sequence], 0, x, x, stream=5),
        lambda: cache.decode(sequence, 0, stream=5),
        lambda: sequence.append(0, x, x, stream=5),
        lambda: plan.run(0, ones(1, 4), stream=5),
        lambda: kvant.save(cache, tmp_path / "b.kvs", stream=5),
        lambda: kvant.load(path, stream=5),
        lambda: kvant.load(path, into=cache, stream=5),
        lambda: kvant.copy_sequences(sequence, kvant.Cache(kv_heads=2, head_dim=D, layers=2), stream=5),
        lambda: kvant.merge([(np.ones((2, 4), np.float32), np.ones(2, np.float32))], stream=5),
        lambda: pages.begin_step(*tables, stream=5),
        lambda: pages.write(pool, x, x, [0], stream=5),
        lambda: pages.decode(pool, [0], ones(64, 2), None, stream=5),
        lambda: pages.copy(pool, [0], [1], stream=5),
        lambda: pages.take_misses(stream=5),
        lambda: pages.take_non_finite(stream=5),
        lambda: pages_plan.set_tables(*tables, stream=5),
        lambda: pages_plan.run(pool, ones(1, 4), stream=5),
        lambda: pages_plan.take_errors(stream=5),
    ]
    for call in calls:
        with refused("^stream is given, but "):
            call()
    assert len(sequence) == 10 and cache.owner.count() == 1 and not (tmp_path / "b.kvs").exists()


def test_a_stream_is_a_number():
    for stream in (-1, 2**64, 1.5, "5", True, ctypes.c_void_p(5)):
        with refused("^stream = "):
            kvant._streams.number(stream)


# --- objects ----------------------------------------------------------------------------------------------------------

COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("how", COPIES)
def test_objects_of_the_library_are_not_copied(cache, sequence, pages, how):
    step = cache.step([cache.sequence()], 1)
    objects = [cache, sequence, cache.plan(sequence, q_heads=4), pages, pages.plan(4, max_batch=1, max_blocks=1), step]
    for x in objects:
        with pytest.raises(TypeError, match=f"a kvant.{type(x).__name__} cannot be copied or pickled: .*; ."):
            COPIES[how](x)
    del objects, x
    assert len(sequence) == 10 and cache.attend(sequence, 0, ones(1, 4)).shape == (1, 4, D)


def test_objects_that_were_never_made(cache, sequence, pages, tmp_path):
    """As those of a subclass that forgot super().__init__()."""
    x, q, path = ones(1, 2), ones(1, 4), tmp_path / "a.kvs"
    kvant.save(cache, path)
    new = {name: getattr(kvant, name).__new__(getattr(kvant, name)) for name in
           ("Cache", "Sequence", "Plan", "Pages", "PagesPlan", "Snapshot", "Bases", "Step")}  # fmt: skip
    c, s, plan, p, pages_plan, snapshot, bases, step = new.values()
    calls = {
        "Cache": [c.sequence, c.memory, c.trim, c.describe, c.close, lambda: c.handle, lambda: repr(c), c.__exit__,
                  lambda: c.reserve([], 1), lambda: c.attend([], 0, q), lambda: c.plan([], q_heads=4),
                  lambda: c.decode([], 0), lambda: c.reorder([], []), lambda: c.step([], 1), c.take_non_finite,
                  lambda: c.write([], 0, x, x), lambda: c.advance([], 1), lambda: kvant.save(c, path),
                  lambda: kvant.load(path, into=c), lambda: kvant.copy_sequences(sequence, c)],
        "Sequence": [s.fork, s.remove, lambda: s.truncate(0), lambda: len(s), lambda: s.append(0, x, x), lambda: s.id,
                     lambda: s.number, lambda: repr(s), s.__exit__, lambda: cache.attend(s, 0, q),
                     lambda: kvant.copy_sequences(s, cache), lambda: kvant.save(cache, path, sequences=[s])],
        "Plan": [plan.explain, lambda: plan.run(0, q), lambda: repr(plan), lambda: plan.facts, lambda: plan.handle],
        "Pages": [p.close, lambda: p.handle, lambda: p.plan(4, max_batch=1, max_blocks=1), lambda: repr(p),
                  lambda: p.write(aligned_pool(pages, 2), x, x, [0]), lambda: p.copy(aligned_pool(pages, 2), [0], [1]),
                  lambda: p.block_bytes, p.take_misses, p.__exit__],
        "PagesPlan": [pages_plan.explain, lambda: pages_plan.run(aligned_pool(pages, 2), q), pages_plan.take_errors,
                      lambda: pages_plan.set_tables(np.zeros((1, 1), np.int32), [1], [0, 1]), lambda: pages_plan.facts],
        "Snapshot": [snapshot.load, snapshot.verify, lambda: snapshot.tokens(0), lambda: snapshot.copy(path),
                     lambda: snapshot.info, lambda: repr(snapshot)],
        "Bases": [lambda: bases.path, lambda: repr(bases), lambda: kvant.Cache(kv_heads=2, head_dim=D, bases=bases)],
        "Step": [lambda: step.write(0, x, x), lambda: step.attend(0, q), lambda: step.__exit__(None, None, None)],
    }  # fmt: skip
    for name, those in calls.items():
        for call in those:
            with refused(f"^this kvant.{name} was never made: its __init__ did not run"):
                call()
        assert not hasattr(new[name], "no_such_thing")
    with pytest.raises(AttributeError, match="'Cache' object has no attribute 'seqence'"):
        cache.seqence
    del new, c, s, plan, p, pages_plan, snapshot, bases, step
    assert len(sequence) == 10


def test_each_object_names_what_its_init_makes(cache, sequence, pages, tmp_path):
    kvant.save(cache, tmp_path / "a.kvs")
    step = cache.step([cache.sequence()], 1)
    snapshot, pages_plan = kvant.Snapshot(tmp_path / "a.kvs"), pages.plan(4, max_batch=1, max_blocks=1)
    for x in (cache, sequence, cache.plan(sequence, q_heads=4), pages, pages_plan, snapshot, step):
        assert set(vars(x)) == set(type(x)._made_of), type(x)
    del x


# --- tensors without memory -------------------------------------------------------------------------------------------


@pytest.fixture
def memoryless(torch):
    def resized(size):
        x = torch.ones(1, 4, D)
        x.untyped_storage().resize_(size)
        return x

    def strided():  # whose last element alone is behind the storage
        x = torch.ones(1, 4, D)[:, ::2]
        x.untyped_storage().resize_(4 * 3 * D - 1)
        return x

    return {
        "freed": resized(0),
        "cut": resized(4 * 4 * D - 1),
        "strided": strided(),
        "meta": torch.ones(1, 4, D, device="meta"),
        "sparse": torch.ones(1, 4, D).to_sparse(),
        "rows": torch.ones(4, D).to_sparse_csr(),
        "zero": torch._efficientzerotensor((1, 4, D)),
        "nested": torch.nested.nested_tensor([torch.ones(4, D)]),
        "later": torch.nn.parameter.UninitializedBuffer(),
    }


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_memory(cache, sequence, torch, memoryless):
    good = torch.ones(1, 4, D)
    for name, x in memoryless.items():
        for call in (
            lambda: cache.attend(sequence, 0, x),
            lambda: cache.attend(sequence, 0, good, out=x),
            lambda: sequence.append(0, x, x),
            lambda: cache.attend(sequence, 0, good, mask=x),
            lambda: kvant.merge([(x, torch.ones(1, 4))]),
        ):
            with refused("^(q|out|keys|mask|partials).*(memory|layout|f32|is on meta)"):
                call()
    with refused("q is a torch tensor on cpu .* with 1023 bytes of memory where it needs 1024: .*give a tensor"):
        cache.attend(sequence, 0, memoryless["cut"])
    empty = torch.ones(0, 2, D)
    empty.untyped_storage().resize_(0)
    sequence.append(0, empty, empty)
    assert len(sequence) == 10


@pytest.mark.slow  # torch imports its compiler for them
def test_fake_tensors(cache, sequence, torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(1, 4, D)
    with refused("q is a torch tensor on cpu .* with no memory"):
        cache.attend(sequence, 0, x)


# --- nothing has changed after an error -------------------------------------------------------------------------------


def failing_attends():
    q, kv = ones(1, 4), ones(1, 2)
    nan = kv.copy()
    nan[0, 1, 5] = np.nan
    readonly = q.copy()
    readonly.flags.writeable = False
    return {
        "heads": dict(q=ones(1, 3)),
        "mask": dict(mask=np.ones((1, 1, 1, 3), bool)),
        "out": dict(out=np.empty((1, 4, D - 1), np.float32)),
        "out's dtype": dict(out=np.empty((1, 4, D), np.float64)),
        "read-only out": dict(out=readonly),
        "sinks": dict(sink_logits=np.zeros(3, np.float32)),
        "lse": dict(lse=np.zeros(3, np.float32)),
        "softcap": dict(softcap=-1.0),
        "isa": dict(isa="nowhere"),
        "kernel": dict(kernel="nope"),
        "q_lens": dict(q_lens=[2]),
        "q_len": dict(q_len=2),
        "layer": dict(layer=7),
        "keys": dict(keys=ones(2, 2)),
        "values": dict(values=ones(1, 1)),
        "NaN": dict(values=nan),
        "unknown": dict(windo=5),
        "fresh_keys": dict(fresh_keys="yes"),
        "stream": dict(stream=3),
        "out is q": dict(q=q, out=q),
    }


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", failing_attends())
def test_an_attend_that_fails_appends_nothing(cache, sequence, rng, name, layer):
    """In the first layer of a step and in a later one, which the second try completes."""
    q, k, v = (rng.standard_normal((1, h, D)).astype(np.float32) for h in (4, 2, 2))
    if layer == 1:
        cache.attend(sequence, 0, q, k, v)
    before = len(sequence)
    arguments = {"layer": layer, "q": q, "keys": k, "values": v, **failing_attends()[name]}
    with pytest.raises((kvant.KvantError, TypeError)):
        cache.attend(sequence, **arguments)
    assert len(sequence) == before
    again = cache.attend(sequence, layer, q, k, v)
    alone = cache.sequence()
    for i in range(layer + 1):
        alone.append(i, np.concatenate([ones(10, 2), k]), np.concatenate([ones(10, 2), v]))
    if layer == 0:
        sequence.append(1, k, v)
        alone.append(1, np.concatenate([ones(10, 2), k]), np.concatenate([ones(10, 2), v]))
    assert len(sequence) == 11
    np.testing.assert_array_equal(again, cache.attend(alone, layer, q))


def test_an_attend_of_a_long_prompt_that_fails_can_be_repeated(rng):
    """Under a window and with exact ends, as if it had never been tried."""
    k, v, q = (rng.standard_normal((500, h, D)).astype(np.float32) for h in (2, 2, 4))
    outs = []
    for fails in (False, True):
        cache = kvant.Cache(kv_heads=2, head_dim=D, window=100, sink_pages=1, tail_pages=1)
        s = cache.sequence()
        cache.attend(s, 0, q[:300], k[:300], v[:300])
        if fails:
            with pytest.raises(kvant.InvalidArgument):
                cache.attend(s, 0, q[300:], k[300:], v[300:], softcap=-1.0)
            assert len(s) == 300
        outs.append(cache.attend(s, 0, q[300:], k[300:], v[300:]))
    np.testing.assert_array_equal(*outs)


# --- closing ----------------------------------------------------------------------------------------------------------


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_closing_a_cache_that_plans_use_frees_its_memory(rng):
    k = rng.standard_normal((30000, 8, D)).astype(np.float32)  # 123 MB of f32 pages with the values
    before = resident_bytes()
    cache = kvant.Cache(kv_heads=8, head_dim=D, k="f32", v="f32")
    sequence = cache.sequence()
    sequence.append(0, k, k)
    plan, held = cache.plan(sequence, q_heads=8), resident_bytes()
    plan.run(0, ones(1, 8))
    cache.close()
    cache.close()
    assert held - before > 100e6 and resident_bytes() - before < 0.3 * (held - before)
    for call in (plan.explain, lambda: plan.run(0, ones(1, 8)), lambda: sequence.truncate(0), lambda: cache.memory()):
        with refused("closed$"):
            call()
    del sequence, plan, cache


def test_closing_pages_that_plans_use(pages):
    pool, plan = aligned_pool(pages, 2), pages.plan(4, max_batch=1, max_blocks=2)
    pages.write(pool, ones(1, 2), ones(1, 2), [0])
    plan.set_tables(np.zeros((1, 1), np.int32), [1], [0, 1])
    assert plan.run(pool, ones(1, 4)).shape == (1, 4, D)
    with pages:
        pass
    calls = [
        lambda: pages.write(pool, ones(1, 2), ones(1, 2), [0]),
        lambda: pages.copy(pool, [0], [1]),
        lambda: pages.plan(4, max_batch=1, max_blocks=2),
        lambda: plan.run(pool, ones(1, 4)),
        lambda: plan.set_tables(np.zeros((1, 1), np.int32), [1], [0, 1]),
        plan.explain,
    ]
    for call in calls:
        with refused("closed$"):
            call()
    pages.close()
