"""kvant.hf.save and load, and prefix_cache: caches go on bit for bit, in other processes, and others are refused."""

from __future__ import annotations

import copy
import json
import os
import threading

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

import kvant.hf  # noqa: E402
from hf_support import EXACT, ISA, ON_DEVICE, PACKED, forward, ids_of, new_cache, with_cache  # noqa: E402
from kvant.hf import prefixes, saving  # noqa: E402

MIXED = dict(short_windows=True, isa=ISA)  # tq6/tq4 with exact ends


@pytest.fixture
def disabled(llama, sliding):
    yield
    for model in (llama, sliding):
        kvant.hf.disable(model)


@pytest.fixture(params=[("llama", PACKED), ("llama", MIXED), ("sliding", MIXED), ("sliding", EXACT)],
                ids=["llama-packed", "llama", "sliding", "sliding-exact"])
def model(request, disabled):
    name, options = request.param
    return kvant.hf.enable(request.getfixturevalue(name), **options)


def load(model, path, **options):
    return kvant.hf.load(model, path, max_length=512, batch=12, **options)


def go_on(model, cache, prompts, steps=3):
    """Logits of a question and of some tokens after it."""
    logits = [forward(model, cache, ids_of(prompts, 70, begin=900))]
    for _ in range(steps):
        logits.append(forward(model, cache, logits[-1][:, -1].argmax(-1, keepdim=True)))
    return torch.cat(logits, 1)


# --- save and load ---


def test_a_loaded_cache_goes_on_bit_for_bit(model, prompts, tmp_path):
    cache = new_cache(model)
    forward(model, cache, ids_of(prompts, 230))
    kvant.hf.save(cache, tmp_path / "chat.kvs", tokens=[ids_of(prompts, 230)[0].tolist()], name="chat")
    assert len(list(tmp_path.iterdir())) == len(cache.groups)
    loaded = load(model, tmp_path / "chat.kvs", tokens=[ids_of(prompts, 230)[0].tolist()])
    assert loaded.get_seq_length() == 230 and loaded.batch_size == 1
    assert str(kvant.hf.report(loaded)) == str(kvant.hf.report(cache))
    assert torch.equal(go_on(model, loaded, prompts), go_on(model, cache, prompts))
    loaded.crop(-5)
    cache.crop(-5)
    assert torch.equal(go_on(model, loaded, prompts), go_on(model, cache, prompts))


def test_generate_goes_on(model, prompts, tmp_path):
    ids = ids_of(prompts, 100)
    cache = new_cache(model)
    first = model.generate(ids, max_new_tokens=20, do_sample=False, **with_cache(cache))
    kvant.hf.save(cache, tmp_path / "chat.kvs")
    longer = torch.cat([first, ids_of(prompts, 20, begin=500)], 1)
    answers = [
        model.generate(longer, max_new_tokens=20, do_sample=False, **with_cache(each))
        for each in (load(model, tmp_path / "chat.kvs"), cache)
    ]
    assert torch.equal(*answers)


def test_padded_rows(model, prompts, tmp_path):
    batch = prompts(150, 90, 20)
    cache = new_cache(model)
    forward(model, cache, batch["input_ids"], attention_mask=batch["attention_mask"])
    kvant.hf.save(cache, tmp_path / "chat.kvs")
    loaded = load(model, tmp_path / "chat.kvs")
    assert loaded.batch_size == 3 and loaded.get_seq_length() == 150
    assert torch.equal(loaded.stored.cpu(), cache.stored.cpu())
    mask = torch.cat([batch["attention_mask"], torch.ones_like(batch["attention_mask"][:, :9])], 1)
    more = batch["input_ids"][:, -9:]
    a, b = (forward(model, each, more, attention_mask=mask) for each in (loaded, cache))
    assert torch.equal(a, b)


def test_saved_again_under_the_same_name(sliding, prompts, tmp_path, disabled):
    kvant.hf.enable(sliding, **MIXED)
    cache, path = new_cache(sliding), tmp_path / "chat.kvs"
    for n in (100, 200):
        forward(sliding, cache, ids_of(prompts, 100, begin=n))
        kvant.hf.save(cache, path)
        assert len(list(tmp_path.iterdir())) == len(cache.groups) == 2
        assert load(sliding, path).get_seq_length() == n
    other = tmp_path / "other.kvs"
    kvant.hf.save(cache, other)
    part = next(p for p in tmp_path.iterdir() if p.name.startswith("chat.kvs."))
    part.write_bytes(next(p for p in tmp_path.iterdir() if p.name.startswith("other.kvs.")).read_bytes())
    with pytest.raises(kvant.InvalidArgument, match='"hf.set" is'):  # a file of another cache
        load(sliding, path)
    part.unlink()
    with pytest.raises(kvant.FileError, match="cannot open"):
        load(sliding, path)


def test_a_link_leads_to_all_files(sliding, prompts, tmp_path, disabled):
    kvant.hf.enable(sliding, **MIXED)
    cache, folder = new_cache(sliding), tmp_path / "folder"
    forward(sliding, cache, ids_of(prompts, 150))
    folder.mkdir()
    (tmp_path / "latest").symlink_to(folder / "chat.kvs")
    kvant.hf.save(cache, tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink() and os.listdir(tmp_path) in (["latest", "folder"], ["folder", "latest"])
    parts = [p for p in folder.iterdir() if p.name != "chat.kvs"]
    assert len(parts) == 1 and parts[0].name.startswith("chat.kvs.")
    for path in (tmp_path / "latest", folder / "chat.kvs"):
        assert load(sliding, path).get_seq_length() == 150
    # Links to all of the files, in a folder of links.
    links = tmp_path / "links"
    links.mkdir()
    for i, file in enumerate([folder / "chat.kvs", *parts]):
        (links / file.name).symlink_to(file.rename(folder / str(i)))
    assert load(sliding, links / "chat.kvs").get_seq_length() == 150


def test_formats_are_those_of_the_file(llama, prompts, tmp_path, disabled):
    kvant.hf.enable(llama, k="tq4", v="tq8", isa=ISA)
    cache = new_cache(llama)
    forward(llama, cache, ids_of(prompts, 100))
    kvant.hf.save(cache, tmp_path / "chat.kvs")
    kvant.hf.enable(llama, isa=ISA)
    loaded = load(llama, tmp_path / "chat.kvs")
    assert kvant.hf.report(loaded).rows[0].k == "tq4"
    assert torch.equal(go_on(llama, loaded, prompts), go_on(llama, cache, prompts))


def test_refusals(llama, sliding, small_llama, prompts, tmp_path, disabled):
    path = tmp_path / "chat.kvs"
    kvant.hf.enable(llama, **MIXED)
    cache = new_cache(llama)
    with pytest.raises(ValueError, match="holds no tokens"):
        kvant.hf.save(cache, path)
    with pytest.raises(TypeError, match="must be a cache of kvant.hf"):
        kvant.hf.save(llama, path)
    forward(llama, cache, ids_of(prompts, 100))
    kvant.hf.save(cache, path, tokens=[range(100)])
    with pytest.raises(kvant.InvalidArgument, match="token ids"):
        load(llama, path, tokens=[range(1, 101)])
    with pytest.raises(ValueError, match="layers"):
        load(small_llama, path)
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight += 1e-3
    with pytest.raises(kvant.InvalidArgument, match="is required"):
        load(other, path)
    plain = kvant.Cache(kv_heads=2, head_dim=64).sequence()
    plain.append(0, *torch.zeros(2, 5, 2, 64))
    kvant.save(plain.cache, tmp_path / "plain.kvs")
    with pytest.raises(ValueError, match="no cache of kvant.hf"):
        load(llama, tmp_path / "plain.kvs")
    mixed = kvant.hf.cache(llama, skip_layers=[1], max_length=512, batch=12)
    forward(llama, mixed, ids_of(prompts, 100))
    with pytest.raises(ValueError, match="layer 1 is left to transformers"):
        kvant.hf.save(mixed, path)
    made = kvant.hf.KvantCache(llama.config, saving.Settings(), max_length=512, batch=12)
    forward(llama, made, ids_of(prompts, 100))
    with pytest.raises(ValueError, match="pass model="):
        kvant.hf.save(made, path)
    kvant.hf.save(made, path, model=llama)
    assert load(llama, path).get_seq_length() == 100


def test_fingerprints(llama, sliding, small_llama, disabled):
    first = saving.fingerprint(llama)
    assert first == saving.fingerprint(copy.deepcopy(llama)) == saving.fingerprint(kvant.hf.enable(llama, **MIXED))
    assert len({first, saving.fingerprint(sliding), saving.fingerprint(small_llama)}) == 3
    assert saving.fingerprint(copy.deepcopy(llama).to(torch.bfloat16)) != first


# --- prefixes ---


def chat(model, prompts, turns, answer=12, new=80, cache=None):
    """The conversation after each turn, and the scores of the answers. cache: one of the caller's for all turns."""
    ids, scores = torch.zeros(1, 0, dtype=torch.long, device=model.device), []
    for turn in range(turns):
        ids = torch.cat([ids, ids_of(prompts, new, begin=100 * turn)], 1)
        given = {} if cache is None else with_cache(cache)
        output = model.generate(ids, max_new_tokens=answer, do_sample=False, output_scores=True,
                                return_dict_in_generate=True, **given)
        ids = output.sequences
        scores.append(torch.stack(output.scores))
    return ids, scores


@pytest.mark.parametrize("kind", ["memory", "directory", "copies"])
def test_a_chat_is_what_one_cache_gives(model, prompts, tmp_path, monkeypatch, kind):
    """copies: entries are in host memory, as those of a device are."""
    if kind == "copies":
        monkeypatch.setattr(prefixes.Prefixes, "_keeps_copies", lambda self, cache: True)
    index = kvant.PrefixIndex(tmp_path if kind == "directory" else None)
    options = {name: getattr(model._kvant.settings, name) for name in ("k", "v", "exact", "short_windows", "isa",
                                                                      "sink_pages", "tail_pages")}
    own = chat(model, prompts, 5, cache=new_cache(model))
    kvant.hf.enable(model, prefix_cache=index, **options)
    ids, scores = chat(model, prompts, 5)
    assert torch.equal(ids, own[0])
    assert all(torch.equal(a, b) for a, b in zip(scores, own[1], strict=True))
    assert (index.stats.lookups, index.stats.hits) == (5, 4)
    model.generate(ids[:, : 4 * 92], max_new_tokens=2, do_sample=False)  # a turn back, known but for the last token
    back = torch.cat([ids[:, : 4 * 92], ids_of(prompts, 80, begin=900)], 1)
    before = index.stats
    model.generate(back, max_new_tokens=2, do_sample=False)
    assert before.hits == 5 and index.stats.hits == 6 and index.stats.tokens - before.tokens >= 4 * 92 - 64


def test_other_models_and_options_find_nothing(llama, prompts, tmp_path, disabled):
    index = kvant.PrefixIndex(tmp_path)
    ids = ids_of(prompts, 200)

    def hits(model, **options):
        before = index.stats.hits
        kvant.hf.enable(model, prefix_cache=index, isa=ISA, **options)
        model.generate(ids, max_new_tokens=4, do_sample=False)
        return index.stats.hits - before

    assert [hits(llama), hits(llama), hits(llama, k="tq4"), hits(llama, k="tq4")] == [0, 1, 0, 1]
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight += 1e-3
    assert [hits(other), hits(other), hits(llama)] == [0, 1, 1]
    kvant.hf.disable(llama)
    assert "generate" not in vars(llama)


def test_one_system_prompt_serves_many(llama, prompts, disabled):
    index = kvant.PrefixIndex()
    kvant.hf.enable(llama, prefix_cache=index, isa=ISA, k="f32", v="f32")
    system = ids_of(prompts, 200)
    for i in range(4):
        ids = torch.cat([system, ids_of(prompts, 30, begin=1000 + 100 * i)], 1)
        got = llama.generate(ids, max_new_tokens=100, do_sample=False)
        plain = copy.deepcopy(llama)
        kvant.hf.enable(plain, isa=ISA, k="f32", v="f32")
        assert torch.equal(got, plain.generate(ids, max_new_tokens=100, do_sample=False))
    assert (index.stats.hits, index.stats.tokens) == (3, 3 * 192)


@pytest.mark.parametrize("options", [
    dict(num_beams=3, do_sample=False),
    dict(do_sample=True, num_return_sequences=2),
    dict(prompt_lookup_num_tokens=4, do_sample=False),
], ids=["beams", "samples", "lookup"])
def test_ways_of_generating(llama, prompts, disabled, options):
    """Over exact formats a known prefix changes nothing."""
    kinds = dict(k="f32", v="f32", exact="f32", isa=ISA) if not ON_DEVICE else dict(EXACT)
    ids, longer = ids_of(prompts, 130), ids_of(prompts, 180)
    results = []
    for index in (None, kvant.PrefixIndex()):
        kvant.hf.enable(llama, prefix_cache=index, **kinds)
        llama.generate(ids, max_new_tokens=4, do_sample=False)
        torch.manual_seed(3)
        results.append(llama.generate(longer, max_new_tokens=12, **options))
    assert index.stats.hits == ("prompt_lookup_num_tokens" not in options)  # which gives the model whole prompts
    assert torch.equal(*results)


def test_what_is_not_served_runs_as_before(llama, prompts, disabled):
    index = kvant.PrefixIndex()
    kvant.hf.enable(llama, prefix_cache=index, isa=ISA)
    batch = prompts(150, 90)
    llama.generate(**batch, max_new_tokens=4, do_sample=False)
    llama.generate(**{name: x[1:] for name, x in batch.items()}, max_new_tokens=4, do_sample=False)  # padding
    llama.generate(inputs_embeds=llama.get_input_embeddings()(batch["input_ids"][:1]), max_new_tokens=4)
    llama.generate(batch["input_ids"][:1], max_new_tokens=4, **with_cache(new_cache(llama)))
    assert index.stats.entries == 0 and index.stats.lookups == 0


def test_a_damaged_entry_is_computed_again(llama, prompts, tmp_path, disabled):
    ids = ids_of(prompts, 200)
    kvant.hf.enable(llama, prefix_cache=str(tmp_path), isa=ISA)
    expected = llama.generate(ids, max_new_tokens=8, do_sample=False)
    path = next(tmp_path.iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="damaged and was removed"):
        assert torch.equal(llama.generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_a_folder_that_went_is_said(llama, prompts, tmp_path, disabled):
    kvant.hf.enable(llama, prefix_cache=tmp_path / "gone", isa=ISA)
    (tmp_path / "gone").rmdir()
    with pytest.warns(RuntimeWarning, match="gone"):
        llama.generate(ids_of(prompts, 100), max_new_tokens=4, do_sample=False)


def test_refusals_of_prefix_cache(llama, sliding, disabled, tmp_path):
    for given in (0, -1, True, [], object()):
        with pytest.raises(kvant.InvalidArgument, match="must be a directory, megabytes"):
            kvant.hf.enable(llama, prefix_cache=given)
    assert "_kvant" not in vars(llama)
    with pytest.raises(ValueError, match="short_windows=True.*prefix_cache needs a cache that kvant stores whole"):
        kvant.hf.enable(sliding, prefix_cache=100)
    with pytest.raises(ValueError, match="layer 1 is left to transformers"):
        kvant.hf.enable(llama, prefix_cache=100, skip_layers=[1])


def test_copies_of_models_and_threads(llama, prompts, disabled):
    index = kvant.PrefixIndex()
    kvant.hf.enable(llama, prefix_cache=index, isa=ISA)
    expected = [llama.generate(ids_of(prompts, 150, begin=400 * i), max_new_tokens=6, do_sample=False)
                for i in range(2)]
    twin = copy.deepcopy(llama)
    before, errors = index.stats.hits, []

    def work(model):
        try:
            for i in (0, 1, 0):
                got = model.generate(ids_of(prompts, 150, begin=400 * i), max_new_tokens=6, do_sample=False)
                assert torch.equal(got, expected[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in (llama, twin, llama)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert index.stats.hits - before == 9


def test_the_trained_model(nano, prompts, tmp_path, disabled):
    """The answers of a chat are those of a cache that lasts."""
    kvant.hf.enable(nano, isa=ISA)
    try:
        own = chat(nano, prompts, 4, new=150, cache=kvant.hf.cache(nano, max_length=2048, batch=2))
        kvant.hf.enable(nano, isa=ISA, prefix_cache=tmp_path)
        ids, scores = chat(nano, prompts, 4, new=150)
        assert torch.equal(ids, own[0]) and all(torch.equal(a, b) for a, b in zip(scores, own[1]))
        assert len(list(tmp_path.iterdir())) == 2 + 1  # the last state, and what windows had left of the one before
        back = torch.cat([ids[:, : 3 * 162], ids_of(prompts, 40, begin=900)], 1)
        nano.generate(back, max_new_tokens=2, do_sample=False)
        assert nano._kvant.prefixes.index.stats.tokens >= (162 + 324 + 486 - 3) + 448
    finally:
        kvant.hf.disable(nano)


# --- what a save leaves, whatever happens ---


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2])
def test_a_save_that_fails_leaves_the_older_cache(sliding, prompts, tmp_path, monkeypatch, disabled, error, call):
    """The file that names the others is written last, and nothing of the new ones stays."""
    kvant.hf.enable(sliding, **MIXED)
    cache, path = new_cache(sliding), tmp_path / "chat.kvs"
    forward(sliding, cache, ids_of(prompts, 100))
    kvant.hf.save(cache, path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert len(before) == 2
    forward(sliding, cache, ids_of(prompts, 50, begin=200))
    calls, original = [], kvant.save

    def failing(*arguments, **options):
        calls.append(arguments)
        if len(calls) == call:
            raise error("no more")
        original(*arguments, **options)

    monkeypatch.setattr(kvant, "save", failing)
    with pytest.raises(error, match="no more"):
        kvant.hf.save(cache, path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert load(sliding, path).get_seq_length() == 100


@pytest.mark.parametrize("part", ["../precious", "chat.kvs.x/../../precious", "chat.kvs./../precious", "precious", 5])
def test_files_of_other_names_are_none_of_a_caches(llama, prompts, tmp_path, disabled, part):
    """A forged list of files neither reads nor removes what is elsewhere."""
    kvant.hf.enable(llama, **MIXED)
    folder = tmp_path / "chats"
    (folder / "chat.kvs.x").mkdir(parents=True)
    (folder / "chat.kvs.").mkdir()
    others = [tmp_path / "precious", folder / "precious"]
    for other in others:
        other.write_text("dear")
    cache, path = new_cache(llama), folder / "chat.kvs"
    forward(llama, cache, ids_of(prompts, 100))
    kvant.hf.save(cache, path)
    found = kvant.Snapshot(path)
    loaded = found.load()
    forge(found, loaded, path, {"hf.parts": json.dumps([part])})
    with pytest.raises(ValueError, match="this is no cache of kvant.hf"):
        load(llama, path)
    kvant.hf.save(cache, path)
    assert [other.read_text() for other in others] == ["dear", "dear"]
    assert load(llama, path).get_seq_length() == 100


def saved_and_loaded(model, prompts, path):
    """(the snapshot of 100 tokens of a model's cache, what it holds), from which metadata can be forged."""
    cache = new_cache(model)
    forward(model, cache, ids_of(prompts, 100))
    kvant.hf.save(cache, path)
    found = kvant.Snapshot(path)
    return found, found.load()


def forge(found, loaded, path, changed):
    """Writes a file of what the snapshot `found` holds, with some other metadata."""
    metadata = {**found.info.metadata, **changed}
    kvant.save(loaded.cache, path, sequences=loaded.sequences, model=found.info.model, metadata=metadata)


DEEP = "[" * 100_000  # which json refuses by a RecursionError


@pytest.mark.parametrize(("name", "texts"), [
    ("hf.groups", ["null", "5", "[5]", "[[]]", DEEP]),
    ("hf.options", ["null", "5", "[[]]", '{"bases": "/etc/hostname"}', '{"threads": 1}', '{"strict": true}', DEEP]),
    ("hf.kept", ["null", "5", "[]", '{"kept": {}}', DEEP]),
    ("hf.parts", ["null", "{}", '""', DEEP]),
    ("hf.rows", ["0", "-1", "x", "2"]), ("hf.length", ["0", "99", "1e3"]),
    ("hf.stored", ["A", "AAAA", "/" * 20]),  # 100 tokens are 13 bytes, and "/" is six bits that are set
])  # fmt: skip
def test_forged_metadata_is_refused(llama, prompts, tmp_path, disabled, name, texts):
    kvant.hf.enable(llama, **MIXED)
    path = tmp_path / "chat.kvs"
    found, loaded = saved_and_loaded(llama, prompts, path)
    if name == "hf.groups":
        (part,) = json.loads(found.info.metadata[name])
        others = {0: [None, "ab", [None], [0.5], [[0]], ["0"], {"0": 1}, [0], part[0][::-1], [-1, 0]],
                  1: ["2", None, True, 2.0, 0],
                  2: ["32", 32.0, -32], 3: ["nonsense", "load", "Tensor", "int64", None, 5]}  # fmt: skip
        texts = texts + [
            json.dumps([part[:at] + [x] + part[at + 1 :]]) for at, values in others.items() for x in values
        ]
    for text in texts:
        forge(found, loaded, path, {name: text})
        with pytest.raises(ValueError, match="chat.kvs"):
            load(llama, path)


def test_more_groups_than_files_are_refused(sliding, prompts, tmp_path, disabled):
    kvant.hf.enable(sliding, **MIXED)
    path = tmp_path / "chat.kvs"
    found, loaded = saved_and_loaded(sliding, prompts, path)
    forge(found, loaded, path, {"hf.parts": "[]"})
    with pytest.raises(ValueError, match="2 groups of layers in 1 files"):
        load(sliding, path)


def test_a_file_of_some_of_the_layers_is_refused(sliding, prompts, tmp_path, disabled):
    kvant.hf.enable(sliding, **MIXED)
    path = tmp_path / "chat.kvs"
    found, loaded = saved_and_loaded(sliding, prompts, path)
    groups = json.dumps(json.loads(found.info.metadata["hf.groups"])[:1])
    forge(found, loaded, path, {"hf.parts": "[]", "hf.groups": groups})
    with pytest.raises(ValueError, match="it has the layers .* and this model's cache would store"):
        load(sliding, path)


def test_threads_are_those_of_the_model_that_loads(llama, prompts, tmp_path, disabled):
    kvant.hf.enable(llama, threads=1, **MIXED)
    path = tmp_path / "chat.kvs"
    saved_and_loaded(llama, prompts, path)
    kvant.hf.enable(llama, threads=2, strict=True, k="f32", v="f32")
    loaded = load(llama, path)
    assert (loaded.settings.threads, loaded.settings.strict, loaded.settings.k) == (2, True, "tq6")


def test_ids_of_forward_passes_are_saved(llama, prompts, tmp_path, disabled):
    kvant.hf.enable(llama, **MIXED)
    cache, ids = new_cache(llama), ids_of(prompts, 100)
    forward(llama, cache, ids)
    kvant.hf.save(cache, tmp_path / "chat.kvs")
    assert kvant.Snapshot(tmp_path / "chat.kvs").tokens(0) == ids[0].tolist()
    load(llama, tmp_path / "chat.kvs", tokens=ids.tolist())
    with pytest.raises(kvant.InvalidArgument, match="token ids"):
        load(llama, tmp_path / "chat.kvs", tokens=[range(100)])
    assert torch.equal(load(llama, tmp_path / "chat.kvs").conversation.ids(100).cpu(), ids.cpu())


def test_arguments_are_checked_where_they_are_given(llama, prompts, tmp_path, disabled):
    kvant.hf.enable(llama, **MIXED)
    cache, path = new_cache(llama), tmp_path / "chat.kvs"
    forward(llama, cache, ids_of(prompts, 20))
    kvant.hf.save(cache, path)
    for given in (None, 5, "llama", cache):
        for call in (kvant.hf.cache, lambda x: kvant.hf.load(x, path), kvant.hf.enable):
            with pytest.raises(TypeError, match=f"model is a {type(given).__name__}: must be a transformers model"):
                call(given)
    with pytest.raises(TypeError, match="model is a int"):
        kvant.hf.save(cache, path, model=5)
    with pytest.raises(TypeError, match="must be a cache of kvant.hf or a transformers model"):
        kvant.hf.report(None)
    for name in ("batch", "max_length"):
        for wrong in (0, -1, 1.5, "3", True, 1 << 31):
            with pytest.raises(kvant.InvalidArgument, match=f"{name} = "):
                kvant.hf.cache(llama, **{name: wrong})
            with pytest.raises(kvant.InvalidArgument, match=f"{name} = "):
                kvant.hf.load(llama, path, **{name: wrong})


def test_an_interrupted_pass_is_not_saved_and_nothing_is_lost(llama, prompts, tmp_path, disabled):
    kvant.hf.enable(llama, **MIXED)
    cache = new_cache(llama)
    forward(llama, cache, ids_of(prompts, 50))

    def stop(*_):
        raise KeyboardInterrupt

    hook = llama.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        forward(llama, cache, ids_of(prompts, 3, begin=90))
    hook.remove()
    with pytest.raises(RuntimeError, match=r"call cache.crop\(-3\) to take its tokens back"):
        kvant.hf.save(cache, tmp_path / "chat.kvs")
    cache.crop(-3)
    kvant.hf.save(cache, tmp_path / "chat.kvs")
    assert load(llama, tmp_path / "chat.kvs").get_seq_length() == 50
