/* The CPU kernels of `native.py`. `reference.py` has each of them in plain torch.

   One rule everywhere: the result for a token depends on that token's own inputs only, never on the number of
   other tokens or on the thread. Every sum has one fixed order, so a text gives the same bits alone or in a
   batch, in one piece or token by token. Compiled with -ffp-contract=off: fused multiply-adds are written out
   (FMA, FMAF), because the compiler once fused in one tile of a product and not in another.

   No size is bounded by a constant. Work memory is on the heap, because a thread's stack may be small.

   A matrix [n, k] is packed in panels of 16 rows, so that 16 results are computed side by side and each is
   one chain of fused multiply-adds over k:

       panel 0   w[0..15][0]  w[0..15][1]  …  w[0..15][k-1]
       panel 1   w[16..31][0] …                                    rows past n are zero
*/
#include "vector.h"

/* What this was built from (setup.py: the source and the whole command), and by which compiler. */
const char *built_from(void) { return BUILT_FROM " " __VERSION__; }

/* The number of vector lanes, negative if FMA has two roundings. Machines with equal lanes compute the same
   bits. */
i64 lanes(void) {
    vec fused = FMA(SPLAT(1.0f + 0x1p-23f), SPLAT(1.0f - 0x1p-23f), SPLAT(-1.0f));
    float first[LANES];
    memcpy(first, &fused, sizeof first);
    return first[0] == 0.0f ? -LANES : LANES;
}

/* Matrix products

   Few rows are read as they lie: the time is that of reading the matrix. More are first packed in tiles of TALL
   rows, DEEP columns at a time. Then each panel of the matrix is read once for all of them, from the L2 cache,
   while the panels behind it are fetched, and a tile of results stays in registers:

       packed    x[0..11][0]  x[0..11][1]  …  x[0..11][k-1]       rows past the last are not read

   Each result is one chain of fused multiply-adds over k in either way. After DEEP columns the chain waits in y.
*/

/* Row r of x begins at r · xs, or, packed, at r. More: the chains go on from what is in y. */
#define TILE(NAME, ROWS, PANELS, XS, XK)                                                                     \
    static void NAME(const float *x, i64 xs, const float *w, i64 ws, i64 k, float *y, i64 ys, i64 columns,   \
                     int more) {                                                                             \
        vec acc[ROWS][PANELS * PV];                                                                          \
        float cut[ROWS][PANELS * PANEL], *to = y;                                                            \
        i64 ts = ys;                                                                                         \
        if (columns < PANELS * PANEL) {                                                                      \
            to = cut[0], ts = PANELS * PANEL;                                                                \
            if (more) for (int r = 0; r < ROWS; r++) memcpy(cut[r], y + r * ys, sizeof(float) * columns);    \
        }                                                                                                    \
        UNROLL for (int r = 0; r < ROWS; r++)                                                                \
            UNROLL for (int v = 0; v < PANELS * PV; v++)                                                     \
                acc[r][v] = more ? load(to + r * ts + v * LANES) : SPLAT(0.0f);                              \
        for (i64 i = 0; i < k; i++) {                                                                        \
            vec b[PANELS * PV];                                                                              \
            if (XK == ROWS) /* a tile of TALL rows */                                                        \
                UNROLL for (int p = 0; p < PANELS; p++) __builtin_prefetch(w + (PANELS + p) * ws + i * PANEL); \
            UNROLL for (int v = 0; v < PANELS * PV; v++)                                                     \
                b[v] = load(w + v / PV * ws + i * PANEL + v % PV * LANES);                                   \
            UNROLL for (int r = 0; r < ROWS; r++) {                                                          \
                vec a = SPLAT(x[r * XS + i * XK]);                                                           \
                UNROLL for (int v = 0; v < PANELS * PV; v++) acc[r][v] = FMA(b[v], a, acc[r][v]);            \
            }                                                                                                \
        }                                                                                                    \
        UNROLL for (int r = 0; r < ROWS; r++)                                                                \
            UNROLL for (int v = 0; v < PANELS * PV; v++) store(to + r * ts + v * LANES, acc[r][v]);          \
        if (columns < PANELS * PANEL)                                                                        \
            for (int r = 0; r < ROWS; r++) memcpy(y + r * ys, cut[r], sizeof(float) * columns);              \
    }
#define FEW_ROWS 6 /* with more, the matrix would be read twice */
#define FEW(ROWS, PANELS) TILE(few_##ROWS##x##PANELS, ROWS, PANELS, xs, 1)
FEW(6, 1)
FEW(4, 1)
FEW(2, 2)
FEW(2, 1)
FEW(1, 4)
FEW(1, 1)

/* Tiles of ROWS rows from column c on: the last panel of one may be cut. */
#define TILES(ROWS, PANELS)                                                                                  \
    for (; c < to && (PANELS == 1 || to - c >= PANELS * PANEL); c += PANELS * PANEL)                         \
        few_##ROWS##x##PANELS(x + r * xs, xs, w + c * k, k * PANEL, k, y + r * ys + c, ys, to - c, 0);

static void few_rows(const float *x, i64 xs, const float *w, float *y, i64 ys, i64 rows, i64 k, i64 from, i64 to) {
    for (i64 r = 0, take; r < rows; r += take) {
        i64 c = from, left = rows - r;
        take = left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (take == 6) TILES(6, 1)
        else if (take == 4) TILES(4, 1)
        else if (take == 2) { TILES(2, 2) TILES(2, 1) }
        else { TILES(1, 4) TILES(1, 1) }
    }
}

#if LANES == 16
#define TALL 12 /* rows and 2 panels: 24 of 32 registers, 14 loads for 24 multiply-adds */
#define BROAD 2
#else
#define TALL 6
#define BROAD 1
#endif
#define DEEP 1024
#define PACKED(NAME, ROWS) TILE(NAME, ROWS, 1, 1, TALL) TILE(NAME##_broad, ROWS, BROAD, 1, TALL)
PACKED(tall, TALL)
PACKED(four, 4)
PACKED(two, 2)
PACKED(one, 1)

/* y[rows, columns] of up to BROAD panels. x is packed; w and y begin at the first column. */
static void many_rows(const float *x, const float *w, i64 ws, i64 deep, float *y, i64 ys, i64 rows, i64 columns,
                      int more) {
    int broad = columns > PANEL;
    for (i64 left = rows, take; left > 0; left -= take) {
        take = left >= TALL ? TALL : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        (take == TALL ? broad ? tall_broad : tall
         : take == 4  ? broad ? four_broad : four
         : take == 2  ? broad ? two_broad : two
                      : broad ? one_broad : one)(x, 1, w, ws, deep, y, ys, columns, more);
        x += take == TALL ? TALL * deep : take, y += take * ys;
    }
}

/* Up to TALL rows of x, side by side. Each cache line is read once: rows may lie whole pages apart. */
static void pack_rows(const float *x, i64 xs, i64 rows, i64 deep, float *packed) {
    float some[TALL][PANEL] = {{0}};
    for (i64 i = 0; i < deep; i += PANEL) {
        i64 take = deep - i < PANEL ? deep - i : PANEL;
        for (i64 r = 0; r < rows; r++) memcpy(some[r], x + r * xs + i, sizeof(float) * take);
        for (i64 j = 0; j < take; j++)
            UNROLL for (int r = 0; r < TALL; r++) packed[(i + j) * TALL + r] = some[r][j];
    }
}

/* y[rows, from .. to) = x[rows, k] · wᵀ; from is a multiple of 16. */
static void product(const float *x, i64 xs, const float *w, float *y, i64 ys, i64 rows, i64 k, i64 from, i64 to) {
    if (rows <= FEW_ROWS || !k) {
        few_rows(x, xs, w, y, ys, rows, k, from, to);
        return;
    }
    i64 tiles = (rows + TALL - 1) / TALL;
    float *packed = malloc(sizeof(float) * tiles * TALL * (k < DEEP ? k : DEEP));
    for (i64 begin = 0; begin < k; begin += DEEP) {
        i64 deep = k - begin < DEEP ? k - begin : DEEP;
        for (i64 r = 0; r < rows; r += TALL)
            pack_rows(x + r * xs + begin, xs, rows - r < TALL ? rows - r : TALL, deep, packed + r * deep);
        for (i64 c = from; c < to; c += BROAD * PANEL)
            many_rows(packed, w + c * k + begin * PANEL, k * PANEL, deep, y + c, ys, rows,
                      to - c < BROAD * PANEL ? to - c : BROAD * PANEL, begin > 0);
    }
    free(packed);
}

#define ROWS_AT_ONCE 144

void linear(const float *x, i64 xs, const float *w, float *y, i64 ys, i64 rows, i64 k, i64 n) {
    /* Parts of equal size, as many for each thread. Where rows alone do not make them, columns are cut, too. */
    i64 threads = omp_get_max_threads(), row_parts = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    i64 height = row_parts ? (rows + row_parts - 1) / row_parts : 0;
    height = row_parts > 1 ? (height + TALL - 1) / TALL * TALL : height;
    i64 least = rows <= FEW_ROWS ? 64 : 256; /* packing rows takes the time of some columns */
    i64 width = row_parts % threads ? ((n + threads - 1) / threads + 63) / 64 * 64 : n;
    width = width < least ? least : width;
    i64 column_parts = (n + width - 1) / width;
#pragma omp parallel for schedule(dynamic) if (rows * k * n > PARALLEL_WORK)
    for (i64 part = 0; part < row_parts * column_parts; part++) {
        i64 r = part / column_parts * height, c = part % column_parts * width;
        i64 take = rows - r < height ? rows - r : height;
        if (take > 0) product(x + r * xs, xs, w, y + r * ys, ys, take, k, c, c + width < n ? c + width : n);
    }
}

/* Multiplies part i of x by matrix i; the `groups` matrices follow each other in w. */
void linear_groups(const float *x, i64 xs, const float *w, float *y, i64 rows, i64 groups, i64 k, i64 n) {
    i64 size = (n + PANEL - 1) / PANEL * PANEL * k;
    for (i64 g = 0; g < groups; g++) linear(x + g * k, xs, w + g * size, y + g * n, groups * n, rows, k, n);
}

/* Norms and rotary positions */

/* Norms each head (not if eps < 0), scales it by the weight if there is one, rotates its last r channels.
   With one head and r = 0 it is the plain norm. */
void norm_rotate(const float *x, i64 xs, float *y, const float *cosine, const float *sine, const float *weight,
                 i64 rows, i64 heads, i64 d, i64 r, float eps, float direction) {
#pragma omp parallel for if (rows * heads * d > PARALLEL_WORK)
    for (i64 t = 0; t < rows; t++)
        for (i64 h = 0; h < heads; h++) {
            const float *in = x + t * xs + h * d;
            float *out = y + (t * heads + h) * d;
            float scale = eps < 0 ? 1.0f : inverse_rms(in, d, eps);
            if (weight) for (i64 i = 0; i < d; i++) out[i] = weight[i] * (in[i] * scale);
            else for (i64 i = 0; i < d; i++) out[i] = in[i] * scale;
            float *turned = out + d - r;
            for (i64 i = 0; i < r / 2; i++) {
                float c = cosine[t * (r / 2) + i], s = direction * sine[t * (r / 2) + i];
                float a = turned[2 * i], b = turned[2 * i + 1];
                turned[2 * i] = a * c - b * s;
                turned[2 * i + 1] = b * c + a * s;
            }
        }
}

/* Hyper-connections: n streams of d channels */

/* Scales rows and columns in turn towards a sum of one, columns last. `sum` has space for n. */
INLINE void sinkhorn(float *m, float *sum, const int n, i64 iterations, float eps) {
    for (i64 step = 0; step < iterations; step++) {
        for (int i = 0; step && i < n; i++) {
            float total = eps;
            for (int j = 0; j < n; j++) total += m[i * n + j];
            float scale = 1.0f / total;
            for (int j = 0; j < n; j++) m[i * n + j] *= scale;
        }
        for (int j = 0; j < n; j++) sum[j] = m[j] + eps;
        for (int i = 1; i < n; i++)
            for (int j = 0; j < n; j++) sum[j] += m[i * n + j];
        for (int j = 0; j < n; j++) sum[j] = 1.0f / sum[j];
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) m[i * n + j] *= sum[j];
    }
}

/* `mixed` is overwritten: its first n become the weights of the streams, the next n are scratch. */
INLINE void read_one(const float *x, float *mixed, const float *scale, const float *base, const float *weight,
                     const int n, i64 d, i64 iterations, float hc_eps, float eps, float *seen, float *place,
                     float *mix) {
    float *collapse = mixed, *room = mixed + n;
    const int outs = 2 * n + n * n;
    float inverse = inverse_rms(x, n * d, eps);
    for (int i = 0; i < outs; i++) mixed[i] = mixed[i] * inverse * scale[i] + base[i];
    for (int i = 0; i < n; i++) collapse[i] = sigmoid(mixed[i]) + hc_eps;
    for (int i = 0; i < n; i++) place[i] = 2.0f * sigmoid(mixed[n + i]);
    for (int i = 0; i < n; i++) {
        const float *row = mixed + 2 * n + i * n;
        float most = row[0], sum = 0;
        for (int j = 1; j < n; j++) most = row[j] > most ? row[j] : most;
        for (int j = 0; j < n; j++) sum += mix[i * n + j] = exp_of(row[j] - most);
        for (int j = 0; j < n; j++) mix[i * n + j] = mix[i * n + j] / sum + hc_eps;
    }
    sinkhorn(mix, room, n, iterations, hc_eps);
    for (i64 c = 0; c < d; c++) seen[c] = collapse[0] * x[c];
    for (int i = 1; i < n; i++)
        for (i64 c = 0; c < d; c++) seen[c] = FMAF(collapse[i], x[i * d + c], seen[c]);
    inverse = inverse_rms(seen, d, eps);
    for (i64 c = 0; c < d; c++) seen[c] = weight[c] * (seen[c] * inverse);
}

/* The site's input (collapsed and normed), the weights of its output, the matrix that mixes the streams. */
void hyper_read(const float *x, const float *fn, const float *scale, const float *base, const float *weight,
                float *seen, float *place, float *mix, i64 rows, i64 n, i64 d, i64 iterations, float hc_eps, float eps) {
    i64 outs = 2 * n + n * n;
#pragma omp parallel for if (rows * n * d * 40 > PARALLEL_WORK)
    for (i64 first = 0; first < rows; first += 6) { /* six rows share each read of fn */
        float *mixed = malloc(sizeof(float) * 6 * outs);
        i64 take = rows - first < 6 ? rows - first : 6;
        product(x + first * n * d, n * d, fn, mixed, outs, take, n * d, 0, outs);
        for (i64 t = first; t < first + take; t++) {
            const float *in = x + t * n * d;
            float *own = mixed + (t - first) * outs, *s = seen + t * d, *p = place + t * n, *m = mix + t * n * n;
            if (n == 4) read_one(in, own, scale, base, weight, 4, d, iterations, hc_eps, eps, s, p, m);
            else read_one(in, own, scale, base, weight, (int)n, d, iterations, hc_eps, eps, s, p, m);
        }
        free(mixed);
    }
}

INLINE void write_one(const float *x, const float *y, const float *place, const float *mix, float *out, const int n,
                      i64 d) {
    for (int j = 0; j < n; j++)
        for (i64 c = 0; c < d; c++) {
            float sum = place[j] * y[c];
            for (int i = 0; i < n; i++) sum = FMAF(mix[i * n + j], x[i * d + c], sum);
            out[j * d + c] = sum;
        }
}

void hyper_write(const float *x, const float *y, const float *place, const float *mix, float *out, i64 rows, i64 n,
                 i64 d) {
#pragma omp parallel for if (rows * n * n * d > PARALLEL_WORK)
    for (i64 t = 0; t < rows; t++) {
        const float *in = x + t * n * d, *answer = y + t * d, *p = place + t * n, *m = mix + t * n * n;
        if (n == 4) write_one(in, answer, p, m, out + t * n * d, 4, d);
        else write_one(in, answer, p, m, out + t * n * d, (int)n, d);
    }
}

/* Collapses and norms the streams: the last step of a model. */
void hyper_head(const float *x, const float *fn, float scale, const float *base, const float *weight, float *y,
                i64 rows, i64 n, i64 d, float hc_eps, float eps) {
    float *collapse = malloc(sizeof(float) * n);
    for (i64 t = 0; t < rows; t++) {
        const float *in = x + t * n * d;
        float *out = y + t * d;
        product(in, 0, fn, collapse, 0, 1, n * d, 0, n);
        float inverse = inverse_rms(in, n * d, eps);
        for (i64 c = 0; c < d; c++) out[c] = 0;
        for (i64 i = 0; i < n; i++) {
            float share = sigmoid(collapse[i] * inverse * scale + base[i]) + hc_eps;
            for (i64 c = 0; c < d; c++) out[c] = FMAF(share, in[i * d + c], out[c]);
        }
        inverse = inverse_rms(out, d, eps);
        for (i64 c = 0; c < d; c++) out[c] = weight[c] * (out[c] * inverse);
    }
    free(collapse);
}

/* Experts */

/* scores = sqrt(softplus(logits)); the k best by score + bias (bias null: chosen is given); ties to the lower. */
void route(const float *logits, i64 ls, const float *bias, i64 *chosen, float *weights, i64 rows, i64 count, i64 k,
           float factor) {
    float *score = malloc(sizeof(float) * 2 * count), *biased = score + count;
    for (i64 t = 0; t < rows; t++) {
        const float *in = logits + t * ls;
        float sum = 0;
        for (i64 e = 0; e < count; e++) score[e] = sqrtf(softplus(in[e]));
        if (bias) {
            for (i64 e = 0; e < count; e++) biased[e] = score[e] + bias[e];
            for (i64 j = 0; j < k; j++) {
                i64 best = 0;
                for (i64 e = 1; e < count; e++)
                    if (biased[e] > biased[best]) best = e;
                biased[best] = -INFINITY;
                chosen[t * k + j] = best;
            }
        }
        for (i64 j = 0; j < k; j++) sum += weights[t * k + j] = score[chosen[t * k + j]];
        for (i64 j = 0; j < k; j++) weights[t * k + j] = weights[t * k + j] / (sum + 1e-20f) * factor;
    }
    free(score);
}

/* How many tokens one thread takes to an expert at once. The more, the less often its matrices are read; but each
   thread should get a few parts of the work. */
static i64 together_of(i64 asks) {
    i64 share = asks / (4 * omp_get_max_threads()) / TALL * TALL;
    return share < 24 ? 24 : share > 96 ? 96 : share;
}

/* One expert for a few tokens: gate and up, the gated product, down. `wide` has space for 2 · inner per token. */
static void ask_expert(const float *x, i64 rows, const float *gate_up, const float *down, float *wide, float *y, i64 d,
                       i64 inner, float limit) {
    product(x, d, gate_up, wide, 2 * inner, rows, d, 0, 2 * inner);
    for (i64 r = 0; r < rows; r++) {
        float *gate = wide + r * 2 * inner, *up = gate + inner;
        for (i64 i = 0; i < inner; i++) {
            float g = gate[i] > limit ? limit : gate[i];
            float u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
            gate[i] = g * sigmoid(g) * u;
        }
    }
    product(wide, 2 * inner, down, y, d, rows, inner, 0, d);
}

/* y = the sum of the chosen experts, in their order, and of the shared expert, if there is one: the last of the
   weights. An expert -1 is none. */
void experts(const float *x, const i64 *chosen, const float *weights, const float *gate_up, const float *down, float *y,
             i64 rows, i64 count, i64 k, i64 d, i64 inner, float limit, i64 shared) {
    i64 gate_up_size = (2 * inner + PANEL - 1) / PANEL * PANEL * d, down_size = (d + PANEL - 1) / PANEL * PANEL * inner;
    i64 asks = rows * k, together = together_of(asks);
    float *answers = malloc(sizeof(float) * asks * d);
    i64 *order = malloc(sizeof(i64) * asks), *first = calloc(count + 2, sizeof(i64));
    for (i64 a = 0; a < asks; a++) if (chosen[a] >= 0) first[chosen[a] + 1]++;
    for (i64 e = 0; e < count; e++) first[e + 1] += first[e];
    i64 *next = malloc(sizeof(i64) * count);
    memcpy(next, first, sizeof(i64) * count);
    for (i64 a = 0; a < asks; a++) if (chosen[a] >= 0) order[next[chosen[a]]++] = a;
    i64 parts = 0, (*part)[3] = malloc(sizeof(*part) * (asks + (rows + together - 1) / together));
    if (!shared) memset(y, 0, sizeof(float) * rows * d);
    for (i64 r = 0; shared && r < rows; r += together, parts++)
        part[parts][0] = count, part[parts][1] = r, part[parts][2] = r + together < rows ? r + together : rows;
    for (i64 e = 0; e < count; e++)
        for (i64 a = first[e]; a < first[e + 1]; a += together, parts++)
            part[parts][0] = e, part[parts][1] = a,
            part[parts][2] = a + together < first[e + 1] ? a + together : first[e + 1];
#pragma omp parallel if (rows * (k + 1) * d * inner * 3 > PARALLEL_WORK)
    {
        float *wide = malloc(sizeof(float) * together * 2 * (inner + d));
        float *in = wide + together * 2 * inner, *out = in + together * d;
#pragma omp for schedule(dynamic)
        for (i64 p = 0; p < parts; p++) {
            i64 e = part[p][0], from = part[p][1], many = part[p][2] - from;
            if (e == count) {
                ask_expert(x + from * d, many, gate_up + e * gate_up_size, down + e * down_size, wide, y + from * d, d,
                           inner, limit);
                continue;
            }
            for (i64 i = 0; i < many; i++) memcpy(in + i * d, x + order[from + i] / k * d, sizeof(float) * d);
            ask_expert(in, many, gate_up + e * gate_up_size, down + e * down_size, wide, out, d, inner, limit);
            for (i64 i = 0; i < many; i++) memcpy(answers + order[from + i] * d, out + i * d, sizeof(float) * d);
        }
#pragma omp for
        for (i64 t = 0; t < rows; t++)
            for (i64 j = 0; j < k; j++)
                for (i64 c = 0; chosen[t * k + j] >= 0 && c < d; c++)
                    y[t * d + c] = FMAF(weights[t * k + j], answers[(t * k + j) * d + c], y[t * d + c]);
        free(wide);
    }
    free(part), free(next), free(first), free(order), free(answers);
}

/* Rows of the cache: fp32 entries in memory, `per_row` in a row. */
typedef struct {
    char *rows;
    i64 row_bytes, per_row, bytes;
} entries;

INLINE void *entry_at(const entries *all, i64 number) {
    if (all->row_bytes == all->per_row * all->bytes) return all->rows + number * all->bytes;
    return all->rows + number / all->per_row * all->row_bytes + number % all->per_row * all->bytes;
}

/* The number in the pages of entry e of a token's text. */
INLINE i64 number_of(const flat *f, i64 token, i64 per_row, i64 e) {
    return (i64)pages_of(f, token)[e / per_row] * per_row + e % per_row;
}

/* The first n entries of a token's text. */
static void walk_pages(const entries *all, const flat *f, i64 token, i64 n, const float **row) {
    const int32_t *page = pages_of(f, token);
    for (i64 e = 0; e < n; page++) {
        const char *at = all->rows + *page * all->row_bytes;
        for (i64 end = e + all->per_row < n ? e + all->per_row : n; e < end; e++, at += all->bytes)
            row[e] = (const float *)at;
    }
}

/* Recent rows: what rings of `ring_rows` rows keep, and the rows of this call. Strides are in bytes. */
typedef struct {
    const char *kept, *new;
    i64 kept_bytes, new_bytes, ring_rows;
} recent;

INLINE const float *recent_at(const recent *r, const flat *f, i64 token, i64 position) {
    i64 own = position - f->start[token];
    if (own >= 0) return (const float *)(r->new + (f->first[token] + own) * r->new_bytes);
    return (const float *)(r->kept + (f->ring[token] * r->ring_rows + position % r->ring_rows) * r->kept_bytes);
}

/* Copies the last `ring_rows` rows of every span into its ring. */
void keep(char *kept, i64 kept_bytes, const char *new, i64 new_bytes, const flat *f, const int32_t *end, i64 ring_rows,
          i64 bytes) {
    for (i64 t = 0; t < f->tokens; t++) {
        i64 at = f->position[t];
        if (at < 0 || at < end[t] - ring_rows) continue;
        memcpy(kept + (f->ring[t] * ring_rows + at % ring_rows) * kept_bytes, new + t * new_bytes, bytes);
    }
}

/* Writes fp32 rows x into the entries of these numbers. */
void put_entries(char *rows, i64 row_bytes, i64 per_row, const i64 *numbers, const char *x, i64 count, i64 bytes) {
    entries all = {rows, row_bytes, per_row, bytes};
    for (i64 i = 0; i < count; i++) memcpy(entry_at(&all, numbers[i]), x + i * bytes, bytes);
}

/* One entry of a compressor: for each channel, values weighted by the softmax of the gates over `width` rows up
   to position `at`. A row is kv then gate, `channels` each. With overlap the first half of the rows use their
   first channels, the second half their last. */
static void compress_one(const recent *r, const flat *f, i64 token, const float *bias, float *most, float *out,
                         i64 width, i64 ratio, i64 dim, i64 channels) {
    float *sum = most + dim;
    i64 begin = f->position[token] - (width - 1);
    for (i64 c = 0; c < dim; c++) most[c] = -INFINITY, sum[c] = 0, out[c] = 0;
    for (int pass = 0; pass < 2; pass++)
        for (i64 j = begin < 0 ? -begin : 0; j < width; j++) {
            i64 shift = width > ratio && j >= ratio ? dim : 0;
            const float *kv = recent_at(r, f, token, begin + j) + shift, *gate = kv + channels;
            const float *b = bias + j % ratio * channels + shift;
            if (!pass) for (i64 c = 0; c < dim; c++) {
                float g = gate[c] + b[c];
                most[c] = g > most[c] ? g : most[c];
            }
            else for (i64 c = 0; c < dim; c++) {
                float share = exp_of(gate[c] + b[c] - most[c]);
                sum[c] += share;
                out[c] = FMAF(share, kv[c], out[c]);
            }
        }
    for (i64 c = 0; c < dim; c++) out[c] /= sum[c];
}

/* The entries that end with a token of this call, and not before `write_from`: y [returned count, dim], their
   numbers in the pages, the positions of their first tokens. */
i64 compress(const char *kept, i64 kept_bytes, const char *new, i64 new_bytes, i64 ring_rows, const flat *f,
             const int32_t *write_from, const float *bias, float *y, i64 *numbers, i64 *firsts, i64 per_row, i64 width,
             i64 ratio, i64 dim, i64 channels) {
    recent r = {kept, new, kept_bytes, new_bytes, ring_rows};
    i64 count = 0;
    for (i64 t = 0; t < f->tokens; t++) {
        i64 at = f->position[t];
        if (at < 0 || (at + 1) % ratio || at < write_from[t]) continue;
        numbers[count] = t, firsts[count++] = at + 1 - ratio;
    }
    if (!count) return 0;
#pragma omp parallel if (count * width * dim * 16 > PARALLEL_WORK)
    {
        float *most = malloc(sizeof(float) * 2 * dim);
#pragma omp for
        for (i64 e = 0; e < count; e++) {
            i64 token = numbers[e];
            compress_one(&r, f, token, bias, most, y + e * dim, width, ratio, dim, channels);
            numbers[e] = number_of(f, token, per_row, f->position[token] / ratio);
        }
        free(most);
    }
    return count;
}

/* The lightning indexer: the k best of the first `visible` keys of each query, ascending; -1: fewer keys.

   score = sum over heads of weight · relu(q · key). Score and number form one integer, so that ties go to
   the lower number and the choice does not depend on the number of keys. */

INLINE uint64_t rank_of(float score, i64 number) {
    union { float f; uint32_t i; } bits = {.f = score + 0.0f};
    uint32_t ordered = bits.i >> 31 ? ~bits.i : bits.i | 0x80000000u;
    return (uint64_t)ordered << 32 | (uint32_t)~number;
}

/* The rank of the k-th best of n. It reorders them. */
static uint64_t kth_best(uint64_t *rank, i64 n, i64 k) {
    i64 low = 0, high = n - 1;
    while (low < high) {
        uint64_t pivot = rank[low + (high - low) / 2];
        i64 i = low, j = high;
        while (i <= j) {
            while (rank[i] > pivot) i++;
            while (rank[j] < pivot) j--;
            if (i <= j) {
                uint64_t other = rank[i];
                rank[i++] = rank[j], rank[j--] = other;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return rank[k - 1];
}

#define HEADS_AT_ONCE 16
#define KEYS_AT_ONCE 4

static void index_scores(const float *q, const float *weights, const float **keys, i64 n, i64 heads, i64 dim,
                         float *scores) {
    i64 groups = (heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    float *turned = calloc(groups * HEADS_AT_ONCE * (dim + 1), sizeof(float));
    float *shares = turned + groups * HEADS_AT_ONCE * dim;
    for (i64 h = 0; h < heads; h++) {
        shares[h] = weights[h];
        for (i64 c = 0; c < dim; c++)
            turned[(h / HEADS_AT_ONCE * dim + c) * HEADS_AT_ONCE + h % HEADS_AT_ONCE] = q[h * dim + c];
    }
    for (i64 first = 0; first < n; first += KEYS_AT_ONCE) {
        const float *key[KEYS_AT_ONCE];
        for (int i = 0; i < KEYS_AT_ONCE; i++) key[i] = keys[first + i < n ? first + i : n - 1];
        float total[KEYS_AT_ONCE] = {0};
        for (i64 g = 0; g < groups; g++) {
            vec acc[KEYS_AT_ONCE][PV];
            UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++)
                UNROLL for (int v = 0; v < PV; v++) acc[i][v] = SPLAT(0.0f);
            const float *column = turned + g * dim * HEADS_AT_ONCE;
            for (i64 c = 0; c < dim; c++) {
                vec a[PV];
                UNROLL for (int v = 0; v < PV; v++) a[v] = load(column + c * HEADS_AT_ONCE + v * LANES);
                UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++)
                    UNROLL for (int v = 0; v < PV; v++) acc[i][v] = FMA(a[v], SPLAT(key[i][c]), acc[i][v]);
            }
            UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) {
                float each[HEADS_AT_ONCE];
                UNROLL for (int v = 0; v < PV; v++) store(each + v * LANES, acc[i][v]);
                for (int h = 0; h < HEADS_AT_ONCE; h++)
                    each[h] = shares[g * HEADS_AT_ONCE + h] * (each[h] > 0 ? each[h] : 0);
                total[i] += sum_of(each);
            }
        }
        for (int i = 0; i < KEYS_AT_ONCE && first + i < n; i++) scores[first + i] = total[i];
    }
    free(turned);
}

/* `Numbering` in entries.py: place -1 is the host, places below that are staged. */
INLINE int32_t numbered(i64 place, i64 step, i64 first, i64 staged, i64 per_row, i64 e) {
    if (place == -1) return (int32_t)(-2 - e);
    i64 row = place >= 0 ? place * step + first : staged - 2 - place;
    return (int32_t)(row * per_row + e % per_row);
}

void best_rows(const float *q, const float *weights, i64 ws, char *rows, i64 row_bytes, i64 per_row, i64 ratio,
               const flat *f, const int32_t *pages, i64 pages_each, i64 step, i64 first, i64 staged, int32_t *best,
               i64 heads, i64 dim, i64 k, i64 most) {
    entries keys = {rows, row_bytes, per_row, sizeof(float) * dim};
#pragma omp parallel for schedule(dynamic, 8) if (f->tokens * most * heads * dim > PARALLEL_WORK)
    for (i64 t = 0; t < f->tokens; t++) {
        i64 n = (f->position[t] + 1) / ratio, taken = 0;
        int32_t *out = best + t * k;
        const int32_t *own = pages + f->ring[t] * pages_each;
        if (n <= k) for (; taken < n; taken++) 
            out[taken] = numbered(own[taken / per_row], step, first, staged, per_row, taken);
        else {
            uint64_t *rank = malloc((sizeof(uint64_t) + sizeof(float *) + sizeof(float)) * n);
            const float **key = (const float **)(rank + n);
            float *scores = (float *)(key + n);
            walk_pages(&keys, f, t, n, key);
            index_scores(q + t * heads * dim, weights + t * ws, key, n, heads, dim, scores);
            for (i64 e = 0; e < n; e++) rank[e] = rank_of(scores[e], e);
            uint64_t least = kth_best(rank, n, k);
            for (i64 e = 0; e < n && taken < k; e++)
                if (rank_of(scores[e], e) >= least) 
                    out[taken++] = numbered(own[e / per_row], step, first, staged, per_row, e);
            free(rank);
        }
        for (; taken < k; taken++) out[taken] = -1;
    }
}

/* Attention of each query to the rows it names. A row is both key and value; a sink is a logit without value. */

#define HEADS_TOGETHER 4
#define ROWS_TOGETHER 4

/* Dot products of a few heads with a few rows. The order of each sum does not depend on the others. */
INLINE void scores_of(const float *q, const float **row, const int heads, const int rows, i64 dim, float scale,
                      float *score, i64 count) {
    vec acc[HEADS_TOGETHER][ROWS_TOGETHER];
    UNROLL for (int i = 0; i < HEADS_TOGETHER; i++)
        UNROLL for (int j = 0; j < ROWS_TOGETHER; j++) acc[i][j] = SPLAT(0.0f);
    i64 c = 0;
    for (; c + LANES <= dim; c += LANES) {
        vec b[ROWS_TOGETHER];
        UNROLL for (int j = 0; j < rows; j++) b[j] = load(row[j] + c);
        UNROLL for (int i = 0; i < heads; i++) {
            vec a = load(q + i * dim + c);
            UNROLL for (int j = 0; j < rows; j++) acc[i][j] = FMA(a, b[j], acc[i][j]);
        }
    }
    UNROLL for (int i = 0; i < heads; i++)
        UNROLL for (int j = 0; j < rows; j++) {
            float sum = 0;
            UNROLL for (int l = 0; l < LANES; l++) sum += acc[i][j][l];
            for (i64 rest = c; rest < dim; rest++) sum = FMAF(q[i * dim + rest], row[j][rest], sum);
            score[i * count + j] = sum * scale;
        }
}

/* Weighted sums of the rows for a few heads, which share each read; each sum adds the rows in order. */
INLINE void values_of(const float **row, i64 count, const float *score, const int heads, i64 dim, float *out) {
    i64 c = 0;
    for (; c + PANEL <= dim; c += PANEL) {
        vec acc[HEADS_TOGETHER][PV];
        UNROLL for (int i = 0; i < heads; i++)
            UNROLL for (int v = 0; v < PV; v++) acc[i][v] = SPLAT(0.0f);
        for (i64 j = 0; j < count; j++)
            UNROLL for (int v = 0; v < PV; v++) {
                vec b = load(row[j] + c + v * LANES);
                UNROLL for (int i = 0; i < heads; i++) acc[i][v] = FMA(b, SPLAT(score[i * count + j]), acc[i][v]);
            }
        UNROLL for (int i = 0; i < heads; i++)
            UNROLL for (int v = 0; v < PV; v++) store(out + i * dim + c + v * LANES, acc[i][v]);
    }
    for (; c < dim; c++)
        for (int i = 0; i < heads; i++) {
            float sum = 0;
            for (i64 j = 0; j < count; j++) sum = FMAF(row[j][c], score[i * count + j], sum);
            out[i * dim + c] = sum;
        }
}

static void attend(const float *q, const float **row, i64 count, const float *sinks, float scale, i64 heads, i64 dim,
                   float *score, float *out) {
    for (i64 h = 0; h < heads; h += HEADS_TOGETHER) {
        int together = heads - h < HEADS_TOGETHER ? (int)(heads - h) : HEADS_TOGETHER;
        const float *own_q = q + h * dim;
        i64 j = 0;
        for (; together == HEADS_TOGETHER && count - j >= ROWS_TOGETHER; j += ROWS_TOGETHER)
            scores_of(own_q, row + j, HEADS_TOGETHER, ROWS_TOGETHER, dim, scale, score + j, count);
        for (; j < count; j++) scores_of(own_q, row + j, together, 1, dim, scale, score + j, count);
        for (int i = 0; i < together; i++) {
            float *own = score + i * count, most = sinks[h + i], part[PANEL] = {0};
            for (i64 j = 0; j < count; j++) most = own[j] > most ? own[j] : most;
            for (i64 j = 0; j < count; j++) own[j] = exp_of(own[j] - most);
            for (i64 j = 0; j < count; j++) part[j % PANEL] += own[j];
            float inverse = 1.0f / (sum_of(part) + exp_of(sinks[h + i] - most));
            for (i64 j = 0; j < count; j++) own[j] *= inverse;
        }
        if (together == HEADS_TOGETHER) values_of(row, count, score, HEADS_TOGETHER, dim, out + h * dim);
        else
            for (int i = 0; i < together; i++) values_of(row, count, score + i * count, 1, dim, out + (h + i) * dim);
    }
}

/* How many entries a query may see: those that ended with its token or before, or its list. */
INLINE i64 far_of(const flat *f, i64 token, const int32_t *chosen, i64 k, i64 ratio) {
    if (f->position[token] < 0 || !ratio) return 0;
    return chosen ? k : (f->position[token] + 1) / ratio;
}

/* `ratio` 0: there are no entries. `chosen` [tokens, k]: the entries that a query sees; without it, all. */
void attention(const float *q, const char *kept, i64 kept_bytes, const char *new, i64 new_bytes, i64 ring_rows,
               i64 window, char *rows, i64 row_bytes, i64 per_row, const int32_t *chosen, i64 k, i64 ratio,
               const flat *f, const float *sinks, float scale, float *out, i64 heads, i64 dim) {
    recent r = {kept, new, kept_bytes, new_bytes, ring_rows};
    entries all = {rows, row_bytes, per_row, sizeof(float) * dim};
    i64 far = 0;
    for (i64 t = 0; t < f->tokens; t++) {
        i64 own = far_of(f, t, chosen, k, ratio);
        far = own > far ? own : far;
    }
#pragma omp parallel if (f->tokens * (window + far) * heads * dim > PARALLEL_WORK)
    {
        const float **row = malloc((sizeof(float *) + sizeof(float) * HEADS_TOGETHER) * (window + far));
        float *score = (float *)(row + window + far);
#pragma omp for schedule(dynamic, 8)
        for (i64 t = 0; t < f->tokens; t++) {
            i64 count = 0, here = f->position[t], own = far_of(f, t, chosen, k, ratio);
            for (i64 at = here < window ? 0 : here - window + 1; at <= here; at++)
                row[count++] = recent_at(&r, f, t, at);
            if (chosen) {
                for (i64 j = 0; j < own; j++)
                    if (chosen[t * k + j] >= 0) row[count++] = entry_at(&all, chosen[t * k + j]);
            } else
                walk_pages(&all, f, t, own, row + count), count += own;
            attend(q + t * heads * dim, row, count, sinks, scale, heads, dim, score, out + t * heads * dim);
        }
        free(row);
    }
}
