/* Grouped-query attention on pages, for the CPU. `grouped.py` has each function in plain torch.

   A row of memory is a page: for each kv head its tokens, each a key and then a value of `dim` numbers.

   Queries are taken in tiles: neighbouring tokens of a span, and of each the heads that read one kv head. They
   lie side by side in lanes and share each read of a key. Keys are taken in chunks of 128, from multiples of 128:

       keys      0 ─────────── 128 ─────────── 256 ───── p
       chunk     m0, s0, a0      m1, s1, a1      m2, s2, a2        the most, the sum of weights, weighted values
       total     ((none + chunk 0) + chunk 1) + chunk 2            `add_chunk`, always in this order

   A chunk is summed key by key, each query over the keys that it sees only. So a query's bits follow from its
   own keys: neither the other queries of a tile nor the threads count. Chunks of one tile may be computed by
   several threads; they are added in order afterwards. Few queries lie in lanes in another way, so that lanes are
   not empty: scores and sums of weights are made of four parts, which are lanes there and vectors here.
*/
#include "vector.h"

#define CHUNK 128
#define LEAST -3e38f /* below every score; the difference of two of them is a number */

#if LANES == 16
#define LANE_VECS 3 /* 3 vectors of queries and 8 keys: 24 of 32 registers */
#define KEYS 8
#define FEW_VECS 4
#else
#define LANE_VECS 2
#define KEYS 4
#define FEW_VECS 2
#endif
#define TILE_QUERIES 96
#define MANY_QUERIES (LANES == 8 ? 6 : 12)
#define FEW_QUERIES (LANES == 16 ? 8 : 0) /* up to so many are taken in fours */

typedef struct {
    const char *rows;
    i64 row_bytes, bf16, page_tokens, kv_heads, dim;
} Pages;

/* Queries of `tokens` neighbouring tokens of one text; together they see the keys from `begin` to `end`. */
typedef struct {
    i64 token, tokens, begin, end, first_part;
    const int32_t *pages;
} Tile;

typedef struct {
    const float *q, *sinks;
    const flat *flat;
    float scale;
    i64 window, heads, group; /* window 0: there is none */
} Queries;

/* The work memory of one thread. */
typedef struct {
    float *turned;     /* [4][dim / 4][lanes]: channels 0, 4, 8, …, then 1, 5, 9, … */
    float *score;      /* [CHUNK][lanes] */
    float *most, *sum; /* [lanes] of a chunk */
    float *weighted;   /* [queries][dim] of a chunk */
    float *wide;       /* [CHUNK][2 · dim]: bf16 entries as fp32 */
    int32_t *low, *high;
    const float *key[CHUNK + 1];
    i64 lanes, queries;
    int few; /* `turned` is [fours][dim / 4][4 queries][4 channels], `score` [fours][CHUNK][4 queries] */
} Work;

static Work *make_work(i64 queries, i64 dim, i64 bf16) {
    i64 lanes = (queries + LANES - 1) / LANES * LANES, whole = (dim + 3) / 4 * 4;
    Work *work = malloc(sizeof(Work));
    float *all = malloc(sizeof(float) * (lanes * (whole + CHUNK + 2) + queries * dim + (bf16 ? CHUNK * 2 * dim : 0)));
    work->turned = all, work->score = all + lanes * whole, work->most = work->score + lanes * CHUNK;
    work->sum = work->most + lanes, work->weighted = work->sum + lanes, work->wide = work->weighted + queries * dim;
    work->low = malloc(sizeof(int32_t) * 2 * lanes), work->high = work->low + lanes;
    return work;
}

static void free_work(Work *work) { free(work->turned), free(work->low), free(work); }

/* The queries of a tile side by side, scaled, and which keys each of them sees. */
static void take_queries(const Queries *all, const Tile *tile, i64 head, i64 dim, Work *work) {
    i64 group = all->group, queries = tile->tokens * group, lanes = (queries + LANES - 1) / LANES * LANES;
    i64 quarter = (dim + 3) / 4;
    work->queries = queries, work->lanes = lanes, work->few = queries <= FEW_QUERIES;
    if (work->few) memset(work->turned, 0, sizeof(float) * 4 * quarter * lanes);
    for (i64 i = 0; i < lanes; i++) {
        i64 token = tile->token + i / group;
        const float *q = all->q + (token * all->heads + head * group + i % group) * dim;
        if (!work->few)
            for (i64 c = 0; c < dim; c++)
                work->turned[(c % 4 * quarter + c / 4) * lanes + i] = i < queries ? q[c] * all->scale : 0.0f;
        else if (i < queries)
            for (i64 c = 0; c < dim; c++)
                work->turned[(i / 4 * quarter + c / 4) * 16 + i % 4 * 4 + c % 4] = q[c] * all->scale;
        int32_t end = i < queries ? all->flat->position[token] + 1 : 0;
        work->high[i] = end, work->low[i] = all->window && end > all->window ? end - (int32_t)all->window : 0;
    }
}

/* Where the keys are: in the pages, or, from bf16, in the work memory. A value follows its key. */
static void find_keys(const Pages *pages, const int32_t *table, i64 head, i64 from, i64 to, Work *work) {
    i64 dim = pages->dim, size = 2 * dim * (pages->bf16 ? 2 : 4), tokens = pages->page_tokens, left = 0;
    const char *found = NULL;
    for (i64 at = from; at < to; at++, left--, found += size) {
        if (!left) {
            i64 inner = at % tokens;
            found = pages->rows + table[at / tokens] * pages->row_bytes + (head * tokens + inner) * size;
            left = tokens - inner;
        }
        float *wide = work->wide + (at - from) * 2 * dim;
        if (pages->bf16)
            for (i64 c = 0; c < 2 * dim; c++) {
                union { uint32_t i; float f; } number = {.i = (uint32_t)((const uint16_t *)found)[c] << 16};
                wide[c] = number.f;
            }
        work->key[at - from] = pages->bf16 ? wide : (const float *)found;
    }
    work->key[to - from] = work->key[to - from - 1] + 2 * dim;
}

/* Dot products of some lanes with some keys. Each is four chains, over channels 0, 4, 8, …, over 1, 5, 9, …, and
   so on, which are added in order. Meanwhile keys and values further on are fetched, piece by piece: they follow
   each other in a page. */
#define SCORES(VECS, COUNT)                                                                                  \
    static void scores_##VECS##x##COUNT(const float *turned, i64 lanes, const float *const *key, i64 dim,    \
                                        float *score) {                                                      \
        i64 quarter = (dim + 3) / 4;                                                                         \
        for (i64 r = 0; r < 4; r++) {                                                                        \
            const float *own = turned + r * quarter * lanes;                                                 \
            vec acc[COUNT][VECS];                                                                            \
            UNROLL for (int j = 0; j < COUNT; j++)                                                           \
                UNROLL for (int v = 0; v < VECS; v++) acc[j][v] = SPLAT(0.0f);                               \
            for (i64 c = r; c < dim; c += 4, own += lanes) {                                                 \
                vec q[VECS];                                                                                 \
                __builtin_prefetch(key[COUNT] + c * 2 * COUNT);                                              \
                UNROLL for (int v = 0; v < VECS; v++) q[v] = load(own + v * LANES);                          \
                UNROLL for (int j = 0; j < COUNT; j++) {                                                     \
                    vec a = SPLAT(key[j][c]);                                                                \
                    UNROLL for (int v = 0; v < VECS; v++) acc[j][v] = FMA(q[v], a, acc[j][v]);               \
                }                                                                                            \
            }                                                                                                \
            UNROLL for (int j = 0; j < COUNT; j++)                                                           \
                UNROLL for (int v = 0; v < VECS; v++) {                                                      \
                    float *to = score + j * lanes + v * LANES;                                               \
                    store(to, r ? load(to) + acc[j][v] : acc[j][v]);                                         \
                }                                                                                            \
        }                                                                                                    \
    }
#define SCORES_OF(VECS, COUNT) SCORES(VECS, COUNT)
SCORES_OF(LANE_VECS, KEYS)
SCORES(1, 1)
SCORES_OF(1, KEYS)
#if LANE_VECS == 3
SCORES(3, 1)
#define SCORES_MANY scores_3x8
#define SCORES_ONE scores_3x1
#define SCORES_KEYS scores_1x8
#else
SCORES(2, 1)
#define SCORES_MANY scores_2x4
#define SCORES_ONE scores_2x1
#define SCORES_KEYS scores_1x4
#endif

static void score_keys(Work *work, i64 count, i64 dim) {
    for (i64 lane = 0, vecs; lane < work->lanes; lane += vecs * LANES) {
        vecs = work->lanes - lane >= LANE_VECS * LANES ? LANE_VECS : 1;
        const float *turned = work->turned + lane;
        float *score = work->score + lane;
        i64 j = 0;
        for (; count - j >= KEYS; j += KEYS)
            (vecs == 1 ? SCORES_KEYS : SCORES_MANY)(turned, work->lanes, work->key + j, dim, score + j * work->lanes);
        for (; j < count; j++)
            (vecs == 1 ? scores_1x1 : SCORES_ONE)(turned, work->lanes, work->key + j, dim, score + j * work->lanes);
    }
}

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE vec pick(ints mask, vec a, vec b) { return (vec)((mask & (ints)a) | (~mask & (ints)b)); }

/* `exp_of` for numbers up to 0, in every lane. */
INLINE vec exp_below(vec x) {
    const float round = 12582912.0f; /* 1.5 · 2^23: a sum with it is rounded to a whole number */
    x = pick(x < -87.0f, SPLAT(-87.0f), x);
    vec n = x * 1.44269504088896341f + round;
    n -= round;
    vec r = FMA(n, SPLAT(-0.693359375f), x);
    r = FMA(n, SPLAT(2.12194440e-4f), r);
    vec p = SPLAT(1.9875691500e-4f);
    p = FMA(p, r, SPLAT(1.3981999507e-3f));
    p = FMA(p, r, SPLAT(8.3334519073e-3f));
    p = FMA(p, r, SPLAT(4.1665795894e-2f));
    p = FMA(p, r, SPLAT(1.6666665459e-1f));
    p = FMA(p, r, SPLAT(5.0000001201e-1f));
    p = FMA(p * r, r, r) + 1.0f;
    ints two = (__builtin_convertvector(n, ints) + 127) << 23;
    return p * (vec)two;
}

/* Scores become weights; for each lane the most and the sum, over the keys that it sees: the sum of those at
   positions 0, 4, 8, …, then 1, 5, 9, …, and so on. `whole`: all lanes that count see all keys. */
INLINE void weigh_lanes(Work *work, i64 lane, i64 from, i64 count, const int whole) {
    ints low, high;
    memcpy(&low, work->low + lane, sizeof low), memcpy(&high, work->high + lane, sizeof high);
    vec most = SPLAT(LEAST), sum[4] = {SPLAT(0.0f), SPLAT(0.0f), SPLAT(0.0f), SPLAT(0.0f)};
    for (i64 j = 0; j < count; j++) {
        float *score = work->score + j * work->lanes + lane;
        vec own = load(score);
        if (!whole) own = pick((low <= (int32_t)(from + j)) & (high > (int32_t)(from + j)), own, SPLAT(LEAST));
        most = pick(own > most, own, most);
        if (!whole) store(score, own);
    }
    for (i64 j = 0; j < count; j++) {
        float *score = work->score + j * work->lanes + lane;
        vec weight = exp_below(load(score) - most);
        if (!whole) weight = pick((low <= (int32_t)(from + j)) & (high > (int32_t)(from + j)), weight, SPLAT(0.0f));
        sum[(from + j) % 4] += weight;
        store(score, weight);
    }
    store(work->most + lane, most), store(work->sum + lane, sum[0] + sum[1] + sum[2] + sum[3]);
}

static void weigh(Work *work, i64 from, i64 count) {
    int whole = 1;
    for (i64 i = 0; i < work->queries; i++) whole &= work->low[i] <= from && work->high[i] >= from + count;
    for (i64 lane = 0; lane < work->lanes; lane += LANES)
        if (whole) weigh_lanes(work, lane, from, count, 1);
        else weigh_lanes(work, lane, from, count, 0);
}

/* Few queries are taken in fours, with the same operations: else most lanes would be empty, and a decode would
   compute longer than it reads. */
#if LANES == 16
/* Dot products of four queries with eight keys: the lanes of a vector are the four chains of each query. */
static void score_four(const float *turned, const float *const key[9], i64 dim, float *score) {
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    vec acc[8];
    UNROLL for (int k = 0; k < 8; k++) acc[k] = SPLAT(0.0f);
    i64 c = 0;
    for (; c + 4 <= dim; c += 4) {
        vec q = load(turned + c * 4);
        UNROLL for (int l = 0; l < 4; l++) __builtin_prefetch(key[8] + (c + l) * 16);
        UNROLL for (int k = 0; k < 8; k++) acc[k] = FMA(q, _mm512_broadcast_f32x4(_mm_loadu_ps(key[k] + c)), acc[k]);
    }
    for (int k = 0; c < dim && k < 8; k++) {
        __m128 last = _mm_maskz_loadu_ps((1 << (dim - c)) - 1, key[k] + c);
        acc[k] = FMA(load(turned + c * 4), _mm512_broadcast_f32x4(last), acc[k]);
    }
    UNROLL for (int k = 0; k < 8; k += 4) { /* [key][query][chain] to [chain][query][key] */
        __m512d a = (__m512d)_mm512_unpacklo_ps(acc[k], acc[k + 1]), b = (__m512d)_mm512_unpackhi_ps(acc[k], acc[k + 1]);
        __m512d d = (__m512d)_mm512_unpacklo_ps(acc[k + 2], acc[k + 3]);
        __m512d e = (__m512d)_mm512_unpackhi_ps(acc[k + 2], acc[k + 3]);
        vec sum = (vec)_mm512_unpacklo_pd(a, d) + (vec)_mm512_unpackhi_pd(a, d);
        sum = sum + (vec)_mm512_unpacklo_pd(b, e) + (vec)_mm512_unpackhi_pd(b, e);
        store(score + k * 4, _mm512_permutexvar_ps(turn, sum));
    }
}

/* Scores become weights, as in `weigh_lanes`: the lanes of a vector are four keys, and of each the queries. */
static void weigh_four(Work *work, i64 four, i64 from, i64 count, float *score) {
    float each[16];
    ints low, high, at;
    for (i64 l = 0; l < 16; l++) {
        i64 query = four * 4 + l % 4, end = work->high[query];
        low[l] = work->low[query], at[l] = (int32_t)(from + l / 4);
        high[l] = (int32_t)(end < from + count ? end : from + count);
    }
    vec most = SPLAT(LEAST), sum = SPLAT(0.0f);
    for (i64 j = 0; j < count; j += 4) {
        vec own = load(score + j * 4);
        ints here = at + (int32_t)j;
        most = pick((low <= here) & (high > here) & (own > most), own, most);
    }
    store(each, most);
    for (i64 l = 4; l < 16; l++) each[l % 4] = each[l] > each[l % 4] ? each[l] : each[l % 4];
    for (i64 l = 4; l < 16; l++) each[l] = each[l % 4];
    most = load(each), memcpy(work->most + four * 4, each, sizeof(float) * 4);
    for (i64 j = 0; j < count; j += 4) {
        ints here = at + (int32_t)j;
        vec weight = pick((low <= here) & (high > here), exp_below(load(score + j * 4) - most), SPLAT(0.0f));
        sum += weight;
        store(score + j * 4, weight);
    }
    store(each, sum);
    for (i64 i = 0; i < 4; i++) {
        float *total = work->sum + four * 4 + i;
        *total = 0;
        for (i64 part = 0; part < 4; part++) *total += each[(part + 4 - from % 4) % 4 * 4 + i];
    }
}

static void weigh_few(Work *work, i64 from, i64 count, i64 dim) {
    for (i64 four = 0; four * 4 < work->queries; four++) {
        float *score = work->score + four * CHUNK * 4;
        for (i64 j = 0; j < count; j += 8) {
            const float *key[9];
            for (i64 k = 0; k < 8; k++) key[k] = work->key[j + k < count ? j + k : count - 1];
            key[8] = work->key[j + 8 < count ? j + 8 : count];
            score_four(work->turned + four * ((dim + 3) / 4) * 16, key, dim, score + j * 4);
        }
        weigh_four(work, four, from, count, score);
    }
}
#else
static void weigh_few(Work *work, i64 from, i64 count, i64 dim) { (void)work, (void)from, (void)count, (void)dim; }
#endif

/* Sums of weighted values for some queries, which share each read. Each is one chain over the keys, and goes on
   from what is in `out`. */
#define VALUES(NAME, QUERIES, VECS)                                                                          \
    static void NAME(const float *const *key, i64 at, i64 count, const float *weight, i64 lanes, float *out, \
                     i64 os) {                                                                               \
        vec acc[QUERIES][VECS];                                                                              \
        UNROLL for (int i = 0; i < QUERIES; i++)                                                             \
            UNROLL for (int v = 0; v < VECS; v++) acc[i][v] = load(out + i * os + v * LANES);                \
        for (i64 j = 0; j < count; j++) {                                                                    \
            vec b[VECS];                                                                                     \
            UNROLL for (int v = 0; v < VECS; v++) b[v] = load(key[j] + at + v * LANES);                      \
            UNROLL for (int i = 0; i < QUERIES; i++) {                                                       \
                vec a = SPLAT(weight[j * lanes + i]);                                                        \
                UNROLL for (int v = 0; v < VECS; v++) acc[i][v] = FMA(b[v], a, acc[i][v]);                   \
            }                                                                                                \
        }                                                                                                    \
        UNROLL for (int i = 0; i < QUERIES; i++)                                                             \
            UNROLL for (int v = 0; v < VECS; v++) store(out + i * os + v * LANES, acc[i][v]);                \
    }
VALUES(values_many, MANY_QUERIES, 2)
VALUES(values_many_narrow, MANY_QUERIES, 1)
VALUES(values_four, 4, FEW_VECS)
VALUES(values_four_narrow, 4, 1)
VALUES(values_one, 1, 4)
VALUES(values_one_narrow, 1, 1)

/* `many` queries from number `query` on, keys from j to `end` of the chunk. */
static void add_values(Work *work, i64 query, i64 many, i64 j, i64 end, i64 dim) {
    i64 vecs = many == MANY_QUERIES ? 2 : many == 4 ? FEW_VECS : 4, wide, lanes = work->few ? 4 : work->lanes, c = 0;
    const float *weight = work->score + (work->few ? (query / 4 * CHUNK + j) * 4 + query % 4 : j * lanes + query);
    float *out = work->weighted + query * dim;
    for (; end > j && dim - c >= LANES; c += wide * LANES) {
        wide = dim - c >= vecs * LANES ? vecs : 1;
        (many == MANY_QUERIES ? wide > 1 ? values_many : values_many_narrow
         : many == 4          ? wide > 1 ? values_four : values_four_narrow
                              : wide > 1 ? values_one : values_one_narrow)(work->key + j, dim + c, end - j, weight, lanes,
                                                                           out + c, dim);
    }
    for (; c < dim; c++)
        for (i64 i = 0; i < many; i++)
            for (i64 at = j; at < end; at++)
                out[i * dim + c] = FMAF(work->key[at][dim + c], weight[(at - j) * lanes + i], out[i * dim + c]);
}

/* Queries that see the same keys but for a few take those together. */
static void sum_values(Work *work, i64 from, i64 count, i64 dim) {
    memset(work->weighted, 0, sizeof(float) * work->queries * dim);
    for (i64 query = 0, many; query < work->queries; query += many) {
        i64 left = work->queries - query, low = 0, high = count;
        many = left >= MANY_QUERIES ? MANY_QUERIES : left >= 4 ? 4 : 1;
        const int32_t *lows = work->low + query, *highs = work->high + query;
        for (i64 i = 0; i < many; i++) {
            low = lows[i] - from > low ? lows[i] - from : low;
            high = highs[i] - from < high ? highs[i] - from : high;
        }
        low = low < count ? low : count, high = high < low ? low : high;
        for (i64 i = 0; i < many; i++) {
            i64 own = lows[i] > from ? lows[i] - from : 0, end = highs[i] - from < low ? highs[i] - from : low;
            add_values(work, query + i, 1, own, end, dim);
        }
        add_values(work, query, many, low, high, dim);
        for (i64 i = 0; i < many; i++)
            add_values(work, query + i, 1, high, highs[i] - from < count ? highs[i] - from : count, dim);
    }
}

/* The keys of a tile in chunk number `chunk`: most, sum and weighted values of each query. */
static void attend_chunk(const Pages *pages, const Tile *tile, i64 head, i64 chunk, Work *work) {
    i64 from = chunk * CHUNK, to = from + CHUNK;
    from = from < tile->begin ? tile->begin : from, to = to > tile->end ? tile->end : to;
    find_keys(pages, tile->pages, head, from, to, work);
    if (work->few) weigh_few(work, from, to - from, pages->dim);
    else score_keys(work, to - from, pages->dim), weigh(work, from, to - from);
    sum_values(work, from, to - from, pages->dim);
}

/* Adds a chunk to the total of a query: its most, its sum, and its values in `out`. */
INLINE void add_chunk(float *most, float *sum, float *out, float more, float more_sum, const float *weighted, i64 dim) {
    if (more_sum == 0.0f) return; /* it sees no key of the chunk */
    float top = more > *most ? more : *most, fade = exp_of(*most - top), share = exp_of(more - top);
    *most = top, *sum = *sum * fade + more_sum * share;
    for (i64 c = 0; c < dim; c++) out[c] = FMAF(weighted[c], share, out[c] * fade);
}

/* The totals of a tile's queries for one kv head; `out` is where the first token's heads begin. */
static void begin_total(const Queries *all, const Tile *tile, i64 head, i64 dim, float *out, float *most, float *sum) {
    for (i64 i = 0; i < tile->tokens * all->group; i++) {
        i64 own = head * all->group + i % all->group;
        most[i] = all->sinks ? all->sinks[own] : LEAST, sum[i] = all->sinks ? 1.0f : 0.0f;
        memset(out + (i / all->group * all->heads + own) * dim, 0, sizeof(float) * dim);
    }
}

static void add_to_total(const Queries *all, const Tile *tile, i64 head, i64 dim, float *out, float *most, float *sum,
                         const float *more, const float *more_sum, const float *weighted) {
    for (i64 i = 0; i < tile->tokens * all->group; i++) {
        float *own = out + (i / all->group * all->heads + head * all->group + i % all->group) * dim;
        add_chunk(most + i, sum + i, own, more[i], more_sum[i], weighted + i * dim, dim);
    }
}

static void end_total(const Queries *all, const Tile *tile, i64 head, i64 dim, float *out, const float *sum) {
    for (i64 i = 0; i < tile->tokens * all->group; i++) {
        float *own = out + (i / all->group * all->heads + head * all->group + i % all->group) * dim;
        for (i64 c = 0; c < dim; c++) own[c] /= sum[i];
    }
}

static i64 chunks_of(const Tile *tile) { return (tile->end - 1) / CHUNK - tile->begin / CHUNK + 1; }

/* Cuts tokens into tiles; padding is in none. Returns how many there are; `work`: their multiply-adds;
   `parts`: their chunks; `tallest`: the most tokens of one. */
static i64 make_tiles(const Queries *all, i64 dim, Tile *tile, i64 *parts, i64 *work, i64 *tallest) {
    const flat *f = all->flat;
    i64 count = 0, tall = TILE_QUERIES / all->group > 1 ? TILE_QUERIES / all->group : 1;
    *parts = *work = *tallest = 0;
    for (i64 t = 0, take; t < f->tokens; t += take) {
        i64 at = f->position[t], next = t + 1;
        take = 1;
        if (at < 0) continue;
        while (take < tall && next < f->tokens && f->first[next] == f->first[t] && f->ring[next] == f->ring[t] &&
               f->position[next] == at + take)
            take++, next++;
        i64 end = at + take;
        i64 begin = all->window && at + 1 > all->window ? at + 1 - all->window : 0;
        tile[count] = (Tile){t, take, begin, end, *parts, pages_of(f, t)};
        *parts += chunks_of(tile + count), *work += (end - begin) * take * all->heads * 2 * dim, count++;
        *tallest = take > *tallest ? take : *tallest;
    }
    return count;
}

/* q [tokens, heads, dim] sees the keys of its text up to its own position, or the last `window` of them. */
void grouped_attention(const float *q, float *out, const char *rows, i64 row_bytes, i64 bf16, i64 page_tokens,
                       const flat *f, const float *sinks, float scale, i64 window, i64 heads, i64 kv_heads, i64 dim) {
    Pages pages = {rows, row_bytes, bf16, page_tokens, kv_heads, dim};
    Queries all = {q, sinks, f, scale, window, heads, heads / kv_heads};
    Tile *tile = malloc(sizeof(Tile) * (f->tokens + 1));
    i64 parts, work_all, tallest;
    i64 tiles = make_tiles(&all, dim, tile, &parts, &work_all, &tallest);
    i64 queries = tallest * all.group, size = queries * (dim + 2);
    for (i64 t = 0; t < f->tokens; t++)
        if (f->position[t] < 0) memset(out + t * heads * dim, 0, sizeof(float) * heads * dim);
    /* Few tiles: each chunk is a part of its own, and waits to be added. */
    int split = tiles * kv_heads < 4 * omp_get_max_threads() && parts > tiles && work_all > PARALLEL_WORK;
    float *partial = split ? malloc(sizeof(float) * parts * kv_heads * size) : NULL;
#pragma omp parallel if (work_all > PARALLEL_WORK)
    {
        Work *work = make_work(queries, dim, bf16);
        float *most = malloc(sizeof(float) * 2 * queries), *sum = most + queries;
        if (split) {
#pragma omp for schedule(dynamic)
            for (i64 part = 0; part < parts * kv_heads; part++) {
                i64 head = part % kv_heads, at = 0;
                while (at + 1 < tiles && tile[at + 1].first_part <= part / kv_heads) at++;
                float *own = partial + part * size;
                take_queries(&all, tile + at, head, dim, work);
                attend_chunk(&pages, tile + at, head, tile[at].begin / CHUNK + part / kv_heads - tile[at].first_part, work);
                memcpy(own, work->most, sizeof(float) * work->queries);
                memcpy(own + queries, work->sum, sizeof(float) * work->queries);
                memcpy(own + 2 * queries, work->weighted, sizeof(float) * work->queries * dim);
            }
        }
#pragma omp for schedule(dynamic)
        for (i64 i = tiles * kv_heads - 1; i >= 0; i--) { /* the last ones see most keys */
            const Tile *own = tile + i / kv_heads;
            i64 head = i % kv_heads;
            float *to = out + own->token * heads * dim;
            begin_total(&all, own, head, dim, to, most, sum);
            if (!split) take_queries(&all, own, head, dim, work);
            for (i64 chunk = 0; chunk < chunks_of(own); chunk++) {
                const float *done = split ? partial + ((own->first_part + chunk) * kv_heads + head) * size : NULL;
                if (!split) attend_chunk(&pages, own, head, own->begin / CHUNK + chunk, work);
                add_to_total(&all, own, head, dim, to, most, sum, split ? done : work->most,
                             split ? done + queries : work->sum, split ? done + 2 * queries : work->weighted);
            }
            end_total(&all, own, head, dim, to, sum);
        }
        free(most), free_work(work);
    }
    free(partial), free(tile);
}

/* Norms the keys (not without a weight), rotates their last channels in pairs, and writes keys and values into
   the pages: those of tokens from position `write_from` on. */

INLINE uint16_t bf16_of(float x) { /* rounded to the nearest, of two to the even one */
    union { float f; uint32_t i; } bits = {.f = x};
    return x != x ? 0x7fc0 : (uint16_t)((bits.i + 0x7fff + (bits.i >> 16 & 1)) >> 16);
}

void store_heads(const float *key, i64 ks, const float *value, i64 vs, const float *cosine, const float *sine,
                 const float *weight, float eps, char *rows, i64 row_bytes, i64 bf16, i64 page_tokens,
                 const flat *f, const int32_t *write_from, i64 kv_heads, i64 dim, i64 pairs) {
#pragma omp parallel if (f->tokens * kv_heads * dim > PARALLEL_WORK)
    {
        float *made = malloc(sizeof(float) * 2 * dim);
#pragma omp for
        for (i64 t = 0; t < f->tokens; t++) {
            i64 at = f->position[t];
            if (at < 0 || at < write_from[t]) continue;
            char *page = rows + pages_of(f, t)[at / page_tokens] * row_bytes;
            for (i64 h = 0; h < kv_heads; h++) {
                const float *in = key + t * ks + h * dim;
                float scale = weight ? inverse_rms(in, dim, eps) : 1.0f, *turned = made + dim - 2 * pairs;
                for (i64 i = 0; i < dim; i++) made[i] = weight ? weight[i] * (in[i] * scale) : in[i];
                for (i64 i = 0; i < pairs; i++) {
                    float c = cosine[t * pairs + i], s = sine[t * pairs + i], a = turned[2 * i], b = turned[2 * i + 1];
                    turned[2 * i] = a * c - b * s;
                    turned[2 * i + 1] = b * c + a * s;
                }
                memcpy(made + dim, value + t * vs + h * dim, sizeof(float) * dim);
                i64 entry = (h * page_tokens + at % page_tokens) * 2 * dim;
                if (bf16) for (i64 i = 0; i < 2 * dim; i++) ((uint16_t *)page)[entry + i] = bf16_of(made[i]);
                else memcpy(page + entry * sizeof(float), made, sizeof(float) * 2 * dim);
            }
        }
        free(made);
    }
}

/* The k best of each token by softmax, of equals the lower number first; their weights, with a sum of one if
   `normed`. Padding has no experts. Where logits are NaN, any k are chosen, each once. */
void route_softmax(const float *logits, i64 ls, const int32_t *position, i64 *chosen, float *weights, i64 rows, i64 count,
                   i64 k, i64 normed) {
    float *left = malloc(sizeof(float) * count);
    for (i64 t = 0; t < rows; t++) {
        const float *in = logits + t * ls;
        i64 *own = chosen + t * k;
        float most = -INFINITY, sum = 0, part = 0, *weight = weights + t * k;
        for (i64 e = 0; e < count; e++) most = in[e] > most ? in[e] : most;
        for (i64 e = 0; e < count; e++) sum += exp_of(in[e] - most);
        for (i64 e = 0; e < count; e++) left[e] = in[e] > LEAST ? in[e] : LEAST;
        for (i64 j = 0; j < k; j++) {
            i64 best = 0;
            for (i64 e = 1; e < count; e++)
                if (left[e] > left[best]) best = e;
            left[best] = -INFINITY;
            own[j] = best, weight[j] = exp_of(in[best] - most) / sum, part += weight[j];
        }
        for (i64 j = 0; normed && j < k; j++) weight[j] /= part;
        for (i64 j = 0; position && position[t] < 0 && j < k; j++) own[j] = -1, weight[j] = 0;
    }
    free(left);
}

/* silu(gate) · up, of rows that are gate and then up. */
void gated(const float *x, i64 xs, float *y, i64 rows, i64 inner) {
#pragma omp parallel for if (rows * inner * 8 > PARALLEL_WORK)
    for (i64 t = 0; t < rows; t++) {
        const float *gate = x + t * xs, *up = gate + inner;
        for (i64 i = 0; i < inner; i++) y[t * inner + i] = gate[i] * sigmoid(gate[i]) * up[i];
    }
}
