"""What a cache knows of its conversation beside keys and values: token ids, images, and what the model keeps of it.

Ids come with the forward passes of an enabled model. generate() takes the ids of a whole conversation: `go_back`
compares them with those of the cache, and takes back what another text has in their place.

Some models keep a part of a conversation in themselves and not in its cache: how far images shift positions
(rope_deltas), frequencies of long texts. Another conversation of the same model overwrites that. So each step
records it with the cache, and each use puts it back.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

import torch

from . import identity, positions, versions

_PIECES = 64  # steps whose ids are kept apart, before they are joined

# Arguments of a model that do not change what keys and values of token ids are.
_KNOWN = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"})
_TYPES = frozenset({"token_type_ids", "mm_token_type_ids"})  # zeros for text


def only_text(arguments: dict[str, Any]) -> bool:
    """Whether the token ids among a model's arguments say all of what it sees: no images, no embeddings."""
    return all(
        name in _KNOWN
        or name in (versions.CACHE_NAME, "past_key_values")
        or isinstance(value, (bool, str))
        or (name in _TYPES and isinstance(value, torch.Tensor) and not bool(value.any()))
        or _is_empty(value)
        for name, value in arguments.items()
    )


def _is_empty(value: Any) -> bool:
    """None, and containers of nothing: generate() of image-text models hands on mm_encoder_outputs={} for texts."""
    if isinstance(value, dict):
        value = list(value.values())
    return value is None or (isinstance(value, (list, tuple)) and all(_is_empty(x) for x in value))


class Pass:
    """A forward pass that an enabled model is about to make over a cache."""

    __slots__ = ("arguments", "ids", "model", "offset")

    def __init__(self, model: Any, arguments: dict[str, Any], offset: int):
        self.model, self.offset = weakref.ref(model), offset
        self.arguments = {name: x for name, x in arguments.items() if not isinstance(x, versions.Cache)}
        ids = arguments.get("input_ids")
        usable = isinstance(ids, torch.Tensor) and ids.ndim == 2 and arguments.get("inputs_embeds") is None
        if usable and ids.is_cuda and torch.cuda.is_current_stream_capturing():  # replays have other ids
            usable = False
        self.ids = ids.detach().clone() if usable else None  # the caller may write the next ones in place

    def media(self, config: Any, tokens: int) -> tuple[int, int] | None:
        """Which of its tokens are images, sounds or embeddings: from the first to behind the last. None: all are
        text."""
        if self.ids is None:
            return (0, tokens) if self.arguments.get("inputs_embeds") is not None else None
        known = versions.placeholders(config)
        if tokens == 1 or not known or only_text(self.arguments):
            return None
        places = torch.isin(self.ids, torch.tensor(known, device=self.ids.device)).any(0)
        found = places.nonzero()
        return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, tokens)


class Conversation:
    """The conversation of one cache, whose rows it has. Lengths count padding, as transformers does."""

    def __init__(self) -> None:
        self._pass: Pass | None = None  # that comes next
        self._pieces: list[torch.Tensor] | None = []  # ids [rows, tokens] of steps; None: some are not known
        self.by_embeddings = False  # ids are not known since the model got embeddings
        self.restored = False  # from a file
        self.media: list[tuple[int, int]] = []  # of each step with images or sounds: from the first to behind the last
        # Steps in which tokens saw later ones: where they begin, and where what was seen ends (prefix language models).
        self.ahead: list[tuple[int, int]] = []
        self._seen_ahead = 0  # of the step that comes next, where what was seen ends
        # Pairs of a length and the state that the model keeps from there on. None: in an image no state is known.
        self._kept: list[tuple[int, dict[str, Any] | None]] = []
        self._seen: dict[str, Any] | None = None  # as the model had it last
        self._prepared: dict[str, Any] | None = None  # as generate() has prepared it, before the first pass
        self._shared: dict[str, Any] = {}  # of all rows and any length: the newest
        self.whole_prompt = False  # generate() was given the ids of the whole conversation
        self._computer: weakref.ref | None = None  # the model whose keys these are
        # It at each pass: its identity.moment(), or for single tokens its adapters alone, which take no time.
        self._moments: set[int | None] = set()
        self._adapters: set[tuple | None] = set()

    def copy(self) -> Conversation:
        other = object.__new__(Conversation)
        other.__dict__.update(self.__dict__)
        other._pass = None
        other._pieces = None if self._pieces is None else list(self._pieces)
        other.media, other.ahead, other._kept = list(self.media), list(self.ahead), list(self._kept)
        other._moments, other._adapters = set(self._moments), set(self._adapters)
        return other

    # --- ids ---

    def ids(self, length: int) -> torch.Tensor | None:
        """The ids [rows, length] of a cache of so many tokens; None: they are not known."""
        if not self._pieces or sum(piece.shape[1] for piece in self._pieces) != length:
            return None
        if len(self._pieces) > 1:
            self._pieces = [torch.cat([piece.to(self._pieces[0].device) for piece in self._pieces], 1)]
        return self._pieces[0]

    def know(self, ids: torch.Tensor) -> None:
        """The ids [rows, length] of all tokens are these."""
        self._pieces, self.by_embeddings = [ids], False

    def of_prefix(self, ids: torch.Tensor, asked: Conversation) -> Conversation:
        """The conversation of a cache that begins with a known prefix: that cache takes the place of an empty one, for
        which generate() has counted positions."""
        self.know(ids)
        self._prepared = asked._prepared
        return self

    # --- whose keys these are ---

    def computed_by(self, model: Any, tokens: int) -> None:
        """A model, as it is now, computes so many tokens."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # nothing can be read
            return
        if self._computer is None:
            self._computer = weakref.ref(model)
        if tokens == 1 and self._moments:
            self._adapters.add(identity.adapters(model))
            return
        try:
            self._moments.add(identity.moment(model))
        except identity.Unreadable:  # as whoever asks for the model's identity will be told
            self._moments.add(None)

    def is_of_another(self, model: Any) -> bool:
        """Whether the model was another one, by weights or adapters, when some of the keys were computed. Known of the
        object that computed them alone: another object's identity is compared where it is loaded."""
        if self._computer is None or self._computer() is not model:
            return False
        return self._moments != {identity.moment(model)} or not self._adapters <= {identity.adapters(model)}

    # --- steps ---

    def expect(self, model: Any, arguments: dict[str, Any], length: int, seen: int) -> None:
        """Before a forward pass over a cache of so many tokens, of which kvant stores `seen`."""
        self.settle(length, seen)
        self._pass = Pass(model, arguments, length)

    def settle(self, length: int, seen: int) -> None:
        """Counts the last pass where kvant stores no layer, and was not called in it."""
        last = self._pass
        if last is not None and not seen and last.ids is not None and length == last.offset + last.ids.shape[1]:
            self.step(last.offset, *last.ids.shape, last.model())

    def step(self, offset: int, batch: int, tokens: int, model: Any) -> None:
        """A forward pass has begun over a cache of `offset` tokens, and the model has counted its positions."""
        known, self._pass = self._pass, None
        if known is not None and known.offset != offset:
            known = None
        if offset == 0:
            self._forget()
        seen, self._seen_ahead = self._seen_ahead, 0
        if seen > offset:
            self.ahead.append((offset, seen))
        ids = None if known is None else known.ids
        if ids is not None and tuple(ids.shape) != (batch, tokens):
            ids = None
        if ids is None:
            self._pieces = None
            self.by_embeddings |= known is not None and known.arguments.get("inputs_embeds") is not None
        elif self._pieces is not None:
            self._pieces.append(ids)
            if len(self._pieces) > _PIECES:
                self.ids(offset + tokens)
        if known is not None:
            model = known.model()
        if model is None:
            return
        self.computed_by(model, tokens)
        media = None if known is None else known.media(model.config, tokens)
        if media is not None:
            media = (offset + media[0], offset + media[1])
            self.media.append(media)
        kept, self._shared = positions.read(model)
        if not kept:
            return
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            kept = prepared
        elif known is not None and known.arguments.get("position_ids") is not None:
            return  # the caller counts positions, and the model's own may be another conversation's
        if known is None and any(positions.shifts(x) for x in kept.values()):
            media = (offset, offset + tokens)
        if self._seen is None or any(self._seen.get(name) is not x for name, x in kept.items()):
            self._change(media or (offset, offset), kept)
            self._seen = kept

    def _change(self, media: tuple[int, int], kept: dict[str, Any]) -> None:
        """Records what the model keeps now, after images from one length to another."""
        first, end = media
        if not self._kept:
            self._kept.append((0, {name: positions.unshifted(x) for name, x in kept.items()}))
        if end > first + 1:
            self._kept.append((first + 1, None))
        self._kept.append((end, kept))

    def saw_ahead(self, end: int) -> None:
        """In the pass that comes next tokens see later ones, up to `end`."""
        self._seen_ahead = max(self._seen_ahead, end)

    def prepared(self, model: Any) -> None:
        """generate() has counted positions for the pass that comes next."""
        self._prepared = positions.read(model)[0] or None

    def put_back(self, model: Any, length: int, batch: int | None, counts: bool = True) -> None:
        """Gives a model what it kept of this conversation. batch: rows of the pass that comes next. counts: the model
        counts positions by itself."""
        for name, value in self._shared.items():
            positions.write(model, name, value)
        if not counts:
            return
        kept = self.kept(length) if length else {name: None for name in positions.read(model)[0]}
        if kept:
            self._seen = {name: positions.rows_of(x, batch) for name, x in kept.items()} if batch else kept
            for name, value in self._seen.items():
                positions.write(model, name, value)

    def kept(self, length: int) -> dict[str, Any]:
        """Returns what the model kept at a length, {} where it keeps nothing.

        Errors: ValueError: the cache was cropped into a step with images, whose positions are not known.
        """
        found: dict[str, Any] | None = {}
        for begin, kept in self._kept:
            if begin <= length:
                found = kept
        if found is None:
            raise ValueError(
                f"the cache was cropped to {length} tokens, into a step with images: the positions of its tokens are "
                "not known; use a new cache"
            )
        return found

    def refuse_without_images(self, arguments: dict[str, Any], keep: int = 0) -> None:
        """Refuses to compute tokens anew from one on, where images or sounds are among them that are not given."""
        for begin, end in self.media:
            if keep < end and (begin < keep or only_text(arguments)):
                raise ValueError(
                    f"the tokens of the cache from {keep} on are to be computed anew for this prompt, and some before "
                    f"{end} are of images, sounds or embeddings: pass a new cache, and these again"
                )

    # --- changes ---

    def _forget(self) -> None:
        self._pieces, self.by_embeddings, self.restored = [], False, False
        self.media, self.ahead, self._kept, self._seen = [], [], [], None
        self._computer, self._moments, self._adapters = None, set(), set()

    def clear(self) -> None:
        self._forget()
        self._pass = self._prepared = None
        self._shared, self._seen_ahead = {}, 0

    def crop(self, length: int) -> None:
        """Tokens from a length on are gone."""
        if length <= 0:
            self._forget()
            return
        if self._pieces:
            had = sum(piece.shape[1] for piece in self._pieces)
            if had > length:
                self._pieces = [self.ids(had)[:, :length]]
        self.media = [each for each in self.media if each[0] < length]
        self.ahead = [each for each in self.ahead if each[0] < length]
        self._kept = [each for each in self._kept if each[0] <= length]
        self._seen = None

    def rearrange(self, parents: list[int], rows: int) -> None:
        """Row i becomes what row parents[i] of `rows` was."""
        if self._pieces:
            known = self.ids(sum(piece.shape[1] for piece in self._pieces))
            self._pieces = [known[torch.tensor(parents, device=known.device)]]
        if self._kept and parents != list(range(rows)):
            self._kept = [
                (begin, kept and {name: positions.picked(x, parents, rows) for name, x in kept.items()})
                for begin, kept in self._kept
            ]

    # --- files ---

    def encode(self, length: int) -> str:
        """Returns what the model keeps as a text for files. Errors: ValueError as of kept()."""
        kept = {**self.kept(length), **self._shared}
        encoded = {name: positions.encode(x) for name, x in kept.items()}
        return json.dumps({"kept": encoded, "media": self.media, "ahead": self.ahead})

    def decode(self, text: str, model: Any, rows: int, length: int) -> None:
        """Takes what encode() made. Errors: ValueError: it is of another model, or damaged."""
        kept, shared = positions.read(model)
        try:
            found = json.loads(text)
            given = {name: positions.decode(x, rows if name in kept else None) for name, x in found["kept"].items()}
            media, ahead = ([(int(begin), int(end)) for begin, end in found[name]] for name in ("media", "ahead"))
            if any(not 0 <= begin < end for begin, end in media + ahead):
                raise ValueError(f"images at {media}, tokens that see later ones at {ahead}")
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"what the model keeps of the conversation is damaged: {error!r}") from None
        if set(given) not in (set(kept) | set(shared), set(shared)) or (kept and not set(kept) <= set(given)):
            raise ValueError(f"it has {sorted(given)} of its model, and this one keeps {sorted({**kept, **shared})}")
        device = versions.compute_device(model)
        given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        self.media, self.ahead = media, ahead
        self._shared = {name: given[name] for name in shared}
        if kept:
            now = {name: given[name] for name in kept}
            before = (media[0][0], min(media[-1][1], length)) if media else (0, length)
            self._change(before if any(positions.shifts(x) for x in now.values()) else (0, 0), now)

    def lacks(self, model: Any, length: int) -> bool:
        """Whether a model keeps something of its conversations that is not recorded here."""
        return bool(positions.read(model)[0]) and self.kept(length) == {}

    def shifts(self) -> bool:
        """Whether the model counts positions of this conversation in another way than of a text."""
        return any(positions.shifts(x) for _, kept in self._kept if kept for x in kept.values())


# --- prompts of generate() ---


def go_back(
    cache: Any, model: Any, ids: Any, embedded: int, mask: Any, arguments: dict[str, Any], bound: int | None
) -> None:
    """Before generate() goes on over a cache with a prompt: takes back what the prompt has not, and its last token.

    transformers computes the tokens of a prompt that are behind the length of the cache, and compares nothing.
    ids: [rows, tokens] or None. embedded: tokens of a prompt in embeddings, 0: none. mask: attention_mask or None.
    arguments: the others of generate(). bound: from so many tokens on keys depend on the length of a text.

    Errors: ValueError: the prompt does not go on from where the cache can go back to.
    """
    known, length = cache.conversation, cache.get_seq_length()
    known.settle(length, cache.length)
    tokens = embedded or (0 if ids is None else ids.shape[1])
    known.whole_prompt = mask is None or mask.ndim != 2 or mask.shape[1] == tokens
    if not length or not tokens or not known.whole_prompt:  # with a longer mask, ids are the new ones alone
        return
    before = known.ids(length)
    if before is None or embedded:
        if tokens <= length:
            raise ValueError(
                f"the prompt has {tokens} tokens, where the cache holds {length} that it does not know by their ids: "
                f"pass all tokens of the conversation, or new ones with an attention_mask over all, or a new cache"
            )
        if known.by_embeddings and not embedded and (known.restored or versions.wrapper(model) is not None):
            raise ValueError(
                "the cache does not know the ids of its tokens, some of which the model got as embeddings (a soft "
                "prompt): whether this prompt goes on from them cannot be known; pass tokens= to kvant.hf.save, "
                "inputs_embeds= to generate(), or a new cache"
            )
        return
    rows = before.shape[0]
    if rows % ids.shape[0]:
        return  # another batch, which the cache refuses
    ids = ids.to(before.device).repeat_interleave(rows // ids.shape[0], 0)
    same = _first_difference(before, ids, mask, cache.stored)
    keep = min(same, tokens - 1)
    if keep >= length:
        return
    if not same:
        raise ValueError(
            f"the prompt has no token in common with the {length} tokens that the cache holds: pass the ids of the "
            "whole conversation, or the new ids alone with an attention_mask over all, or a new cache"
        )
    if bound is not None and length > bound and same < length:
        raise ValueError(
            f"the prompt differs from the {length} tokens of the cache at token {same}, and rotary frequencies of "
            f"texts above {bound} tokens depend on their length: pass a new cache"
        )
    known.refuse_without_images(arguments, keep)
    for begin, end in known.ahead:
        if begin < keep < end and same < end:
            raise ValueError(
                f"the prompt differs from the {length} tokens of the cache at token {same}, which tokens before it saw "
                f"(tokens {begin} to {end - 1} see each other in both directions): pass a new cache"
            )
    back(cache, keep, f"the prompt has {same} tokens in common with the {length} tokens of the cache")


def _first_difference(before: torch.Tensor, ids: torch.Tensor, mask: Any, stored: torch.Tensor | None) -> int:
    """How many columns are the same in all rows. Padding, and what a mask hides, is like any token."""
    n = min(before.shape[1], ids.shape[1])
    same = before[:, :n] == ids[:, :n]
    if stored is not None:
        same |= ~stored[:, :n].to(same.device)
    if mask is not None and mask.ndim == 2:
        mask = mask[:, :n].bool().to(same.device).repeat_interleave(len(same) // mask.shape[0], 0)
        same |= ~mask
        if stored is not None:  # a token that was padding when it was given has no keys
            same &= stored[:, :n].to(same.device) | ~mask
    different = (~same).any(0).nonzero()
    return int(different[0]) if len(different) else n


def back(cache: Any, keep: int, why: str) -> None:
    """Takes a cache back to so many tokens. Errors: ValueError, and the cache is as before."""
    length = cache.get_seq_length()
    try:
        if keep:
            cache.crop(keep - length)
        else:
            cache.reset()
    except (ValueError, RuntimeError) as error:  # a window that left its pages, a step that was interrupted
        raise ValueError(
            f"{why}, and the cache cannot go back to {keep} tokens: {error}; pass a new cache, or a copy "
            "(copy.deepcopy) that was made before"
        ) from None


__all__ = ["Conversation", "back", "go_back", "only_text"]

