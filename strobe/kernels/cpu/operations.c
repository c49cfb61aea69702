/* The operations around the products of a step on a CPU.

   Every function takes contiguous float32 tensors as pointers, and computes each row by itself, by
   the same sums in the same order: a row's result depends neither on the other rows nor on the
   number of threads. NaN in a row stays in that row.

   Legend: T rows, H hidden size, D head size, Hq / Hkv query and key-value heads. A loop below
   `#pragma omp simd` computes 8 or 16 values at once; one below `#pragma omp parallel for` divides
   its rounds among threads, if there is enough work for them (`MANY` values).
*/

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    MANY = 1 << 15, /* values, or products of attention, from which a second thread saves time */
    BLOCK = 32,     /* keys whose scores are computed at once */
    LANES = 16,     /* values in a `Lanes` */
};

/* Sixteen values that are computed together: one AVX-512 register, or parts of smaller ones. */
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));

/* e^x to 2 units in the last place, without a branch, so that loops over it use vectors.
   x = n ln 2 + r with a whole n: e^r is a polynomial (Taylor's, |r| < 0.35), and 2^n are the bits of
   an exponent. Adding 1.5 * 2^23 to a number rounds it, and leaves n in the lowest bits. */
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    float y = 1.0f / 5040;
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (int32_t)(((uint32_t)bits << 23) + 0x3f800000u);
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

/* Return the sum of squares of x [n]. */
static inline float square_sum(const float *x, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sum;
}

/* y = x / sqrt(|x|^2 + floor^2) * gain, each [n]: an RMSNorm whose gain has the factor sqrt(n), and
   whose epsilon is floor^2 / n. gain: NULL for sqrt(n). y may be x. */
static inline void norm_row(float *y, const float *x, const float *gain, float floor, int64_t n) {
    float factor = 1.0f / sqrtf(square_sum(x, n) + floor * floor);
    if (gain == NULL) {
        factor *= sqrtf((float)n);
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            y[i] = x[i] * factor;
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            y[i] = x[i] * factor * gain[i];
    }
}

/* y [T, H] = norm(x [T, H]). */
void strobe_norm(float *y, const float *x, const float *gain, float floor, int64_t rows, int64_t n) {
#pragma omp parallel for if (rows * n > MANY)
    for (int64_t t = 0; t < rows; t++)
        norm_row(y + t * n, x + t * n, gain, floor, n);
}

/* sum [T, H] += x [T, H], and normed [T, H] = norm(sum), with the norm that reads the stream next. */
void strobe_add_norm(float *sum, const float *x, float *normed, const float *gain, float floor,
                     int64_t rows, int64_t n) {
#pragma omp parallel for if (rows * n > MANY)
    for (int64_t t = 0; t < rows; t++) {
        float *total = sum + t * n;
        const float *added = x + t * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            total[i] = added[i] + total[i];
        norm_row(normed + t * n, total, gain, floor, n);
    }
}

/* y [T, H] = (x + norm(y)) * scale: a norm of a sub-layer's output, before it is added. */
void strobe_norm_add(float *y, const float *x, const float *gain, float floor, float scale,
                     int64_t rows, int64_t n) {
#pragma omp parallel for if (rows * n > MANY)
    for (int64_t t = 0; t < rows; t++) {
        float *sum = y + t * n;
        const float *added = x + t * n;
        norm_row(sum, sum, gain, floor, n);
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            sum[i] = (added[i] + sum[i]) * scale;
    }
}

/* y [T, n] = gate * sigmoid(gate) * up, x [T, 2 n] with gates and then ups: SiLU. gelu: GELU's
   approximation by tanh instead, which is gate * sigmoid(1.596 (gate + 0.0447 gate^3)). */
void strobe_gate(float *y, const float *x, int64_t rows, int64_t n, int gelu) {
    float linear = gelu ? 1.59576912f : 1.0f;
    float cubic = gelu ? 1.59576912f * 0.044715f : 0.0f;
#pragma omp parallel for if (rows * n > MANY)
    for (int64_t t = 0; t < rows; t++) {
        const float *gates = x + t * 2 * n;
        const float *ups = gates + n;
        float *out = y + t * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            float gate = gates[i];
            float inner = gate * (linear + cubic * gate * gate);
            out[i] = gate / (1.0f + exponential(-inner)) * ups[i];
        }
    }
}

/* y [T, H] = onto + the sum over taps o of (base[o, c] + dynamic[t, o, c / group]) * x[t - o, c],
   without taps that would read before the first row of the row's span. base [taps, H]; a row of
   dynamic begins `stride` values after the one before; offsets [T]: rows' places in their spans;
   onto: NULL for 0. */
void strobe_convolve(float *y, const float *x, const float *base, const float *dynamic,
                     int64_t stride, const int64_t *offsets, const float *onto, int64_t rows,
                     int64_t n, int64_t taps, int64_t group) {
#pragma omp parallel for if (rows * n > MANY)
    for (int64_t t = 0; t < rows; t++) {
        float *out = y + t * n;
        memset(out, 0, n * sizeof(float));
        for (int64_t tap = 0; tap < taps && tap <= offsets[t]; tap++) {
            const float *row = x + (t - tap) * n;
            const float *shared = dynamic + t * stride + tap * (n / group);
            for (int64_t first = 0; first < n; first += group) {
                float own = shared[first / group];
#pragma omp simd
                for (int64_t i = first; i < first + group; i++)
                    out[i] += (base[tap * n + i] + own) * row[i];
            }
        }
        if (onto != NULL) {
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                out[i] = onto[t * n + i] + out[i];
        }
    }
}

/* Rotate a head x [D] in place: pairs half a head apart, by cos and sin [D] of the row's position,
   the first half of sin negated. */
static inline void rotate_head(float *x, const float *cos, const float *sin, int64_t width) {
    int64_t half = width / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = x[i];
        float high = x[half + i];
        x[i] = low * cos[i] + high * sin[i];
        x[half + i] = high * cos[half + i] + low * sin[half + i];
    }
}

/* A drafter's keys and values of context tokens, rows [T, layers, 2, Hkv, D], into a store
   [layers, slots, 2, Hkv, D]: keys normed by each layer's gain [layers, D] and rotated. */
void strobe_store_context(float *store, int64_t layer_size, float *rows, const float *gains,
                          float floor, const float *cos, const float *sin, const int64_t *positions,
                          const int64_t *slots, int64_t count, int64_t layers, int64_t heads,
                          int64_t width) {
    int64_t size = 2 * heads * width;
#pragma omp parallel for collapse(2) if (count * layers * size > MANY)
    for (int64_t t = 0; t < count; t++)
        for (int64_t layer = 0; layer < layers; layer++) {
            float *row = rows + (t * layers + layer) * size;
            int64_t angle = positions[t] * width;
            for (int64_t head = 0; head < heads; head++) {
                float *key = row + head * width;
                norm_row(key, key, gains + layer * width, floor, width);
                rotate_head(key, cos + angle, sin + angle, width);
            }
            memcpy(store + layer * layer_size + slots[t] * size, row, size * sizeof(float));
        }
}

/* One forward's spans; see `strobe.attention.backend.Batch`. */
typedef struct {
    const int64_t *positions;  /* [T] */
    const int64_t *starts;     /* [S] position of each span's first row */
    const int64_t *sizes;      /* [S] rows of each span */
    const int64_t *row_starts; /* [S] each span's first row */
    const int64_t *slots;      /* [S] each span's row in page tables */
    int64_t rows, spans, page_size, columns, limit;
    int64_t most_rows; /* spans of more rows are left to another implementation */
} Batch;

/* A layer's heads. gains [Hq + Hkv, D]: of the norms of queries and keys, NULL without them. */
typedef struct {
    const float *gains, *cos, *sin;
    float *store; /* [slots, 2, Hkv, D] */
    int64_t q_heads, kv_heads, width, window, causal, own_values, value_norm;
    float floor, value_floor;
} Layer;

/* Norm and rotate the queries and keys of every row in place, and store its keys and values.
   joined [T, Hq + 2 Hkv, D], without values if the layer's keys are its values (before norms). */
static void store_rows(const Batch *batch, const Layer *layer, const int64_t *kv_slots,
                       float *joined) {
    int64_t width = layer->width;
    int64_t rotated = layer->q_heads + layer->kv_heads;
    int64_t heads = rotated + (layer->own_values ? layer->kv_heads : 0);
    int64_t size = layer->kv_heads * width;
#pragma omp parallel for if (batch->rows * heads * width > MANY)
    for (int64_t t = 0; t < batch->rows; t++) {
        float *row = joined + t * heads * width;
        float *keys = row + layer->q_heads * width;
        float *stored = layer->store + kv_slots[t] * 2 * size;
        const float *cos = layer->cos + batch->positions[t] * width;
        const float *sin = layer->sin + batch->positions[t] * width;
        memcpy(stored + size, layer->own_values ? keys + size : keys, size * sizeof(float));
        for (int64_t head = 0; layer->value_norm && head < layer->kv_heads; head++) {
            float *value = stored + size + head * width;
            norm_row(value, value, NULL, layer->value_floor, width);
        }
        for (int64_t head = 0; head < rotated; head++) {
            float *x = row + head * width;
            if (layer->gains != NULL)
                norm_row(x, x, layer->gains + head * width, layer->floor, width);
            rotate_head(x, cos, sin, width);
        }
        memcpy(stored, keys, size * sizeof(float));
    }
}

/* Return the sum of sixteen values, always in the same order. */
static inline float lane_sum(Lanes x) {
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int i = 0; i < 8; i++)
        part[i] += part[i + 8];
    for (int i = 0; i < 4; i++)
        part[i] += part[i + 4];
    return (part[0] + part[2]) + (part[1] + part[3]);
}

/* out [D] = softmax(query . keys / sqrt(D)) values, over the keys at positions first to last.

   The keys of a page follow one another, `stride` values apart. Scores are computed for a block of
   keys at a time; the sums so far are kept relative to the largest score so far, and are scaled
   whenever that grows (online softmax). `width` is a constant wherever this is inlined, so that the
   sums [D] stay in registers. */
static inline __attribute__((always_inline)) void
attend_head(float *out, const float *query, const float *store, int64_t stride, int64_t values_after,
            const int64_t *table, uint32_t page_size, int64_t first, int64_t last, int64_t width) {
    Lanes sums[width / LANES];
    const Lanes *q = (const Lanes *)query;
    const Lanes *values[BLOCK];
    float scores[BLOCK];
    float scale = 1.0f / sqrtf((float)width);
    float largest = -INFINITY;
    float total = 0.0f;
    for (int64_t i = 0; i < width / LANES; i++)
        sums[i] = (Lanes){0};
    for (int64_t begin = first; begin <= last; begin += BLOCK) {
        int64_t count = last - begin + 1 < BLOCK ? last - begin + 1 : BLOCK;
        float highest = largest;
        for (int64_t j = 0; j < count; j++) {
            int64_t position = begin + j;
            int64_t slot = table[(uint32_t)position / page_size] + position;
            const Lanes *key = (const Lanes *)(store + slot * stride);
            Lanes products = q[0] * key[0];
            for (int64_t i = 1; i < width / LANES; i++)
                products += q[i] * key[i];
            scores[j] = lane_sum(products) * scale;
            values[j] = (const Lanes *)(store + slot * stride + values_after);
            highest = scores[j] > highest ? scores[j] : highest;
        }
        for (int64_t j = count; j < BLOCK; j++)
            scores[j] = -INFINITY;
#pragma omp simd
        for (int64_t j = 0; j < BLOCK; j++)
            scores[j] = exponential(scores[j] - highest);
        float factor = exponential(largest - highest);
        total *= factor;
        for (int64_t i = 0; i < width / LANES; i++)
            sums[i] *= factor;
        for (int64_t j = 0; j < count; j++) {
            total += scores[j];
            for (int64_t i = 0; i < width / LANES; i++)
                sums[i] += scores[j] * values[j][i];
        }
        largest = highest;
    }
    for (int64_t i = 0; i < width / LANES; i++)
        ((Lanes *)out)[i] = sums[i] / total;
}

/* Return the span of a row. */
static inline int64_t span_of(const Batch *batch, int64_t row) {
    int64_t low = 0;
    int64_t high = batch->spans - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (batch->row_starts[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Attend from one row with the query heads of one key-value head. A row sees keys up to its own
   position, or all keys of its span and before; with a window only those less than `window` away.
   No row reads a slot after its span's last row, where another sequence's keys may be. */
static inline __attribute__((always_inline)) void
attend_row(const Batch *batch, const Layer *layer, const int64_t *tables, const float *joined,
           float *out, int64_t row, int64_t kv_head, int64_t width) {
    int64_t span = span_of(batch, row);
    if (batch->sizes[span] > batch->most_rows)
        return;
    int64_t position = batch->positions[row];
    int64_t last = layer->causal ? position : batch->starts[span] + batch->sizes[span] - 1;
    int64_t first = 0;
    if (layer->window) {
        first = position - layer->window + 1 > 0 ? position - layer->window + 1 : 0;
        last = position + layer->window - 1 < last ? position + layer->window - 1 : last;
    }
    last = last < batch->limit - 1 ? last : batch->limit - 1;
    first = first < last ? first : last; /* a draft beyond the limit, which nobody accepts */
    int64_t repeats = layer->q_heads / layer->kv_heads;
    int64_t heads = layer->q_heads + layer->kv_heads * (layer->own_values ? 2 : 1);
    int64_t size = layer->kv_heads * width;
    const int64_t *table = tables + batch->slots[span] * batch->columns;
    for (int64_t head = kv_head * repeats; head < (kv_head + 1) * repeats; head++)
        attend_head(out + (row * layer->q_heads + head) * width,
                    joined + (row * heads + head) * width, layer->store + kv_head * width, 2 * size,
                    size, table, batch->page_size, first, last, width);
}

/* Return whether `strobe_attention` has code for heads of this size. */
int strobe_has_width(int64_t width) {
    return width == 16 || width == 32 || width == 64 || width == 80 || width == 96 || width == 128 ||
           width == 256;
}

/* Norm, rotate and store the rows' heads, and attend: joined [T, Hq + 2 Hkv, D], which is
   overwritten, -> out [T, Hq, D]. kv_slots [T]: where each row's keys and values are stored.
   tables [N, columns]: position p of a sequence is in slot table[p / page_size] + p. */
void strobe_attention(const Batch *batch, const Layer *layer, const int64_t *kv_slots,
                      const int64_t *tables, float *joined, float *out) {
    store_rows(batch, layer, kv_slots, joined);
    int64_t tasks = batch->rows * layer->kv_heads;
    int64_t work = 0;
    for (int64_t span = 0; span < batch->spans; span++)
        work += (batch->starts[span] + batch->sizes[span]) * batch->sizes[span];
    work *= layer->q_heads * layer->width;
#pragma omp parallel for schedule(dynamic) if (work > 4 * MANY)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t row = task / layer->kv_heads;
        int64_t kv_head = task % layer->kv_heads;
#define ATTEND(WIDTH)                                                                              \
    case WIDTH:                                                                                    \
        attend_row(batch, layer, tables, joined, out, row, kv_head, WIDTH);                        \
        break
        switch (layer->width) {
            ATTEND(16);
            ATTEND(32);
            ATTEND(64);
            ATTEND(80);
            ATTEND(96);
            ATTEND(128);
            ATTEND(256);
        }
    }
}
