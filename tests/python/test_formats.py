"""Blocks of page-centred keys, byte for byte, from an encoder that was written from docs/formats.md alone."""
import itertools
import math

import pytest

import kvant

np = pytest.importorskip("numpy")
F = np.float32
BLOCK = 64

SIGNS = bytes.fromhex(
    "a73b91f46dc2580eb37f24d68945ea1c63afd852970be13d76c419fe4a852cdb"
    "d34ea8179c5be63172b90df5438a6ec7582f94e1b63d0a7cc561d84fa3971e85"
)
MAGNITUDES = {
    "tq2": [81, 122],
    "tq3": [70, 84, 100, 122],
    "tq4": [66, 72, 78, 84, 91, 99, 109, 124],
    "tq5": [64, 66, 68, 70, 72, 74, 76, 78, 80, 82, 85, 88, 91, 95, 100, 108],
}
BITS = {"tq2": 2, "tq3": 3, "tq4": 4, "tq5": 5, "tq6": 6, "tq8": 8, "fp8": 8}
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
OFFSET = {"tq2": 63.5, "tq3": 63.5, "tq4": 63.5, "tq5": 63.5, "tq6": 31.5, "tq8": 127.5}
SPREADS = {
    "tq2": (38.75, (0.96, 1.02, 1.1, 1.26), 0),
    "tq3": (58.5, (0.45, 0.54, 0.59, 0.64, 0.69, 0.74, 0.8, 0.875), 128),
    "tq4": (60.5, (0.77, 0.805, 0.835, 0.865, 0.895, 0.925, 0.955, 1), 128),
    "tq5": (44.5, (0.9, 0.925, 0.95, 0.975, 1, 1.025, 1.05, 1.175), 256),
    "tq6": (31.5, (0.95, 0.96, 0.97, 0.98, 0.99, 1.005, 1.03, 1.065), 256),
    "tq8": (127.5, (0.995, 1, 1.005, 1.01, 1.015, 1.025), 0),
}


# --- rotation ---------------------------------------------------------------------------------------------------------


def paley_20():
    squares = {1, 4, 5, 6, 7, 9, 11, 16, 17}
    c = np.zeros((20, 20), F)
    c[0, 1:], c[1:, 0] = 1, -1
    for i, j in itertools.product(range(19), range(19)):
        c[i + 1, j + 1] = 0 if i == j else 1 if (i - j) % 19 in squares else -1
    return c + np.eye(20, dtype=F)


def rotate(x):
    d = len(x)
    bits = np.array([SIGNS[(i % 512) // 8] >> (i % 8) & 1 for i in range(d)])
    y = np.where(bits == 1, -x, x).astype(F)
    outer, inner = (20, d // 20) if d % 20 == 0 else (1, d)
    y = y.reshape(outer, inner)
    distance = 1
    while distance < inner:
        pairs = y.reshape(outer, -1, 2, distance)
        a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        y = np.stack([a + b, a - b], axis=2).reshape(outer, inner)
        distance *= 2
    if outer == 20:
        p, rows = paley_20(), []
        for i in range(20):
            row = p[i, 0] * y[0]
            for j in range(1, 20):
                row = row + p[i, j] * y[j]
            rows.append(row)
        y = np.stack(rows)
    return y.reshape(d) * F(1 / math.sqrt(d))


def in_basis(format, x):
    return x.astype(F) if format == "fp8" else rotate(x.astype(F))


# --- search -----------------------------------------------------------------------------------------------------------


def lanes(terms):
    sums = np.zeros(32, F)
    for i in range(0, len(terms), 32):
        part = terms[i : i + 32]
        sums[: len(part)] += part
    h = 16
    while h:
        sums[:h] = sums[:h] + sums[h : 2 * h]
        h //= 2
    return sums[0]


def codes_of(format, z):
    """Codes, and e = 2 (level - offset) of each."""
    if format in ("tq6", "tq8"):
        half = F(OFFSET[format] + 0.5)
        codes = np.floor(np.clip(z + half, F(0), half * 2 - 1)).astype(int)
        return codes, (2 * codes - round(2 * OFFSET[format])).astype(F)
    u = MAGNITUDES[format]
    middles = np.array([(a + b) / 2 - 63.5 for a, b in zip(u, u[1:])], F)
    m = (np.abs(z)[:, None] > middles[None]).sum(1)
    negative = z < 0
    e = np.array([2 * x - 127 for x in u], F)[m]
    return m + len(u) * negative, np.where(negative, -e, e).astype(F)


def spread_of(format, k):
    t, factors, _ = SPREADS[format]
    return F(factors[k]) / F(t)


_costs = {}


def costs(format):
    if format not in _costs:
        cells = SPREADS[format][2]
        x = np.arange(cells, dtype=np.float64) / (cells - 1)
        if format == "tq6":
            levels = np.arange(64) - 31.5
        else:
            levels = np.array([s * (u - 63.5) for u in MAGNITUDES[format] for s in (1, -1)])
        base = np.stack(
            [(np.abs(x[:, None] - levels[None] * float(spread_of(format, k))).min(1)) ** 2 for k in range(8)], axis=1
        )
        _costs[format] = np.rint(base * 1023 / base.max()).astype(int)
    return _costs[format]


def attempt(format, y, r):
    codes, e = codes_of(format, y * r)
    p, q = lanes(y * e), F(int((e.astype(np.int64) ** 2).sum()))
    with np.errstate(over="ignore"):
        g = np.float16((p + p) / q)
    g = F(65504) if np.isinf(g) else F(g)
    return g * (p - g * (q * F(0.25))), g, codes


def encode_group(format, y):
    """(codes, g)"""
    anchor = np.abs(y).max() if format != "tq2" else np.sqrt(lanes(y * y) / F(len(y)))
    best = (F(0), F(0), None)
    cells = SPREADS[format][2]
    if anchor >= F(2.0**-40):
        if cells:
            i = np.rint(np.abs(y) * (F(cells - 1) / anchor)).astype(int)
            tries = [int(np.argmin(costs(format)[i].sum(0)))]
        else:
            tries = range(len(SPREADS[format][1]))
        for k in tries:
            found = attempt(format, y, F(1) / (anchor * spread_of(format, k)))
            best = found if found[0] > best[0] else best
        if not cells and best[0] > 0:
            found = attempt(format, y, F(1) / best[1])
            best = found if found[0] > best[0] else best
    if best[2] is None:
        zero = {"tq6": 32, "tq8": 128}.get(format, 0)
        return np.full(len(y), zero), F(0)
    return best[2], best[1]


def encode_fp8(y):
    import torch

    largest = np.abs(y).max()
    half = np.float16(largest / F(448))
    if F(half) * F(448) < largest:
        half = np.uint16(half.view(np.uint16) + 1).view(np.float16)
    if half == 0:
        return np.zeros(len(y), int), F(0)
    scaled = torch.from_numpy(y * (F(1) / F(half)))
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(int), F(half)


def encode(format, y, groups):
    """(codes, scales, decoded)"""
    if format == "fp8":
        import torch

        codes, g = encode_fp8(y)
        levels = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
        return codes, [g], levels * g
    parts = [(*encode_group(format, part), part) for part in np.split(y, groups)]
    decoded = []
    for codes, g, _ in parts:
        if format in ("tq6", "tq8"):
            level = codes.astype(F) - F(OFFSET[format])
        else:
            u = np.array(MAGNITUDES[format])
            m = codes % len(u)
            level = (np.where(codes >= len(u), 127 - u[m], u[m]) - 63.5).astype(F)
        decoded.append(level * g)
    return np.concatenate([c for c, _, _ in parts]), [g for _, g, _ in parts], np.concatenate(decoded)


# --- blocks -----------------------------------------------------------------------------------------------------------


def round_up(n, multiple):
    return -(-n // multiple) * multiple


class Block:
    """A block of an engine's pool, keys and values of one kv head."""

    def __init__(self, k, v, d):
        self.k, self.v, self.d = k, v, d
        self.groups = {f: d // 128 if f in ("tq6", "tq8") and d % 128 == 0 else 1 for f in (k, v)}
        at = 0
        self.planes = {}
        for side, format in (("k", k), ("v", v)):
            for i, bits in enumerate(PLANES[BITS[format]]):
                self.planes[side, i] = at
                at = round_up(at + BLOCK * d * bits // 8, 16)
        self.centre_at = at
        at = round_up(at + 6 * d // 8 + 2, 16)
        self.scales = {}
        for side, format in (("k", k), ("v", v)):
            self.scales[side] = at
            at = round_up(at + 2 * BLOCK * self.groups[format], 16)
        self.bytes = np.zeros(round_up(at, 64), np.uint8)
        self.decoded = np.zeros((BLOCK, d), F)  # without the centre
        self.refused = np.zeros(BLOCK, bool)
        self.centre = np.zeros(d, F)

    def put(self, at, bit, bits, field):
        byte = at + bit // 8
        mask = (1 << bits) - 1 << bit % 8
        self.bytes[byte] = int(self.bytes[byte]) & (255 - mask) | field << bit % 8

    def put_scale(self, at, g, sign=False):
        half = int(np.float16(g).view(np.uint16)) | (0x8000 if sign else 0)
        self.bytes[at], self.bytes[at + 1] = half & 255, half >> 8

    def set_centre(self, m):
        if not np.all(np.abs(m) < F(2.0**20)):
            m = np.zeros(self.d, F)
        codes, (g,), self.centre = encode("tq6", m, 1)
        for j, code in enumerate(codes):
            self.put(self.centre_at, 4 * j, 4, int(code) & 15)
            self.put(self.centre_at + self.d // 2, 2 * j, 2, int(code) >> 4)
        self.put_scale(self.centre_at + 3 * self.d // 4, g)

    def store_key(self, t, row):
        y = in_basis(self.k, row)
        left = y - self.centre
        self.refused[t] = lanes(y * y) < lanes(left * left)
        codes, scales, self.decoded[t] = encode(self.k, y if self.refused[t] else left, self.groups[self.k])
        shift = 0
        for i, bits in enumerate(PLANES[BITS[self.k]]):
            row_at = self.planes["k", i] + t * self.d * bits // 8
            for j, code in enumerate(codes):
                self.put(row_at, j * bits, bits, int(code) >> shift & (1 << bits) - 1)
            shift += bits
        for i, g in enumerate(scales):
            self.put_scale(self.scales["k"] + 2 * (BLOCK * i + t), g, self.refused[t])

    def store_value(self, t, row):
        codes, scales, _ = encode(self.v, in_basis(self.v, row), self.groups[self.v])
        shift = 0
        for i, bits in enumerate(PLANES[BITS[self.v]]):
            for j, code in enumerate(codes):
                field = int(code) >> shift & (1 << bits) - 1
                if bits == 8:
                    self.bytes[self.planes["v", i] + (t // 4 * self.d + j) * 4 + t % 4] = field
                else:
                    word = self.planes["v", i] + (t // 8 * self.d + j) * bits
                    self.put(word, t % 8 * bits, bits, field)
            shift += bits
        for i, g in enumerate(scales):
            self.put_scale(self.scales["v"] + 2 * (BLOCK * i + t), g)


def mean_of_rows(format, rows):
    total = np.zeros(rows.shape[1], F)
    for row in rows:
        total = total + row
    return in_basis(format, total * (F(1) / F(len(rows))))


def mean_of_page(before):
    total = np.zeros(before.d, F)
    for t in range(BLOCK):
        total = total + before.decoded[t]
    share = F(int((~before.refused).sum())) / F(64)
    return before.centre * share + total * F(1 / 64)


def encoded_sequence(k, v, d, keys, values, steps, sealed):
    """Blocks of one sequence whose tokens came in these steps. sealed: pages have exact copies, from which they are
    encoded as a whole, the last one as far as it is written."""
    blocks, begin = [], 0
    for page in range(-(-len(keys) // BLOCK) if sealed else 0):
        here = slice(page * BLOCK, (page + 1) * BLOCK)
        blocks.append(Block(k, v, d))
        blocks[-1].set_centre(mean_of_rows(k, keys[here][: 1 if page == 0 else BLOCK]))
        for t, (key, value) in enumerate(zip(keys[here], values[here])):
            blocks[-1].store_key(t, key)
            blocks[-1].store_value(t, value)
    if sealed:
        return blocks
    for n in steps:
        end = begin + n
        while begin < end:
            page, first = begin // BLOCK, begin % BLOCK
            last = min(end, (page + 1) * BLOCK)
            if first == 0:
                blocks.append(Block(k, v, d))
            block = blocks[page]
            own = keys[page * BLOCK : page * BLOCK + (1 if page == 0 else BLOCK)]
            whole = first == 0 and last == (page + 1) * BLOCK
            if first == 0:
                block.set_centre(
                    mean_of_rows(k, own) if whole or page == 0 else mean_of_page(blocks[page - 1])
                )
            for t in range(begin, last):
                block.store_key(t % BLOCK, keys[t])
                block.store_value(t % BLOCK, values[t])
            begin = last
    return blocks


@pytest.mark.parametrize(
    "k, v, d, tail",
    [
        ("tq4", "tq4", 64, 0),
        ("tq6", "tq4", 128, 0),
        ("tq6", "tq3", 256, 1),
        ("tq3", "tq2", 80, 0),
        ("tq5", "tq5", 64, 1),
        ("tq8", "tq8", 64, 1),
        ("tq2", "fp8", 64, 0),
        ("fp8", "tq4", 64, 0),
        ("fp8", "fp8", 80, 1),
    ],
)
def test_blocks_are_those_of_an_encoder_written_from_the_page(torch, k, v, d, tail):
    rng = np.random.default_rng(d + tail)
    steps = [64 + 20, 30, 1, 64 + 40, 15, 1, 1]
    n = sum(steps)
    keys = rng.normal(size=(n, d)).astype(F)
    keys[:, ::3] += F(2)
    keys[0] *= F(8)  # a sink
    keys[rng.integers(0, n, 40)] *= F(0.1)  # nearer to zero than to any centre
    keys[100] = 0
    values = rng.normal(size=(n, d)).astype(F)
    if tail:  # as copies hold them
        keys, values = (torch.from_numpy(x).bfloat16().float().numpy() for x in (keys, values))
    expected = encoded_sequence(k, v, d, keys, values, steps, tail > 0)

    pages = kvant.Pages(
        kv_heads=1, head_dim=d, k=k, v=v, tail_pages=tail, tail_sequences=min(tail, 1), exact="bf16" if tail else None
    )
    assert pages.block_bytes == len(expected[0].bytes)
    table = torch.tensor([[4, 1, 3, 0]], dtype=torch.int32)
    pool = torch.full((5, 1, pages.block_bytes), 0xFF, dtype=torch.uint8)
    begin = 0
    for count in steps:
        end = begin + count
        pages.begin_step(
            table, torch.tensor([end], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
        )
        slots = torch.tensor([int(table[0, t // BLOCK]) * BLOCK + t % BLOCK for t in range(begin, end)])
        rows = [torch.from_numpy(x[begin:end].copy())[:, None] for x in (keys, values)]
        pages.write(pool, *rows, slots)
        begin = end
    pages.begin_step(table[:0], torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    refused = np.concatenate([block.refused for block in expected])[:n]
    assert 0.1 * n < refused.sum() < 0.9 * n
    for page, block in enumerate(expected):
        got = pool[int(table[0, page]), 0].numpy()
        differ = np.flatnonzero(got != block.bytes)
        assert differ.size == 0, f"page {page}, bytes {differ[:8]} of {len(got)}, centre at {block.centre_at}"
