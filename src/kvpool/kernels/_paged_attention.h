/* The arithmetic of `_paged_attention.c`, which includes this file once for each instruction set. It has defined

     LANES     floats in a vector
     VECTORS   vectors of rows, and
     AT_ONCE   keys (or elements of a value) whose sums with them fit the registers; divides MANY_ROWS_KEYS
     COLUMNS   vectors of elements of a value whose sums for ROWS_AT_ONCE rows fit the registers
     TARGET    the attribute that allows the instructions
     NAME(x)   x with the name of the instruction set

   A row is one query head of one query token. Two forms of the same computation exist. With many rows (prompts, shared
   prefixes) a vector holds one number for each of LANES rows. With few rows (decoding) that would leave lanes empty, so a
   vector holds LANES elements of a head, of all heads in turn. Scores are [key][row] in both. */

#define vec NAME(vec)
#define ints NAME(ints)
#define words NAME(words)
#define halves NAME(halves)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define shorts NAME(shorts)
#define bytes NAME(bytes)

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

INLINE vec NAME(load)(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void NAME(store)(float *to, vec value) { memcpy(to, &value, sizeof value); }

INLINE vec NAME(all)(float value) { return value - (vec){0}; }

INLINE vec NAME(choose)(ints condition, vec yes, vec no) {
    return (vec)((condition & (ints)yes) | (~condition & (ints)no));
}

/* 2 to the power of x, within 2e-7 of it; below 2 to the power of -126 it is 0. */
INLINE vec NAME(power)(vec x) {
    const vec lowest = NAME(all)(-126.0f), highest = NAME(all)(126.0f), round = NAME(all)(12582912.0f);
    const ints vanishes = x < lowest;
    x = NAME(choose)(vanishes, lowest, NAME(choose)(x > highest, highest, x));
    const vec whole = (x + round) - round, part = x - whole;
    vec result = NAME(all)(1.5403530e-4f);
    result = result * part + 1.3333558e-3f;
    result = result * part + 9.6181291e-3f;
    result = result * part + 5.5504109e-2f;
    result = result * part + 2.4022651e-1f;
    result = result * part + 6.9314718e-1f;
    result = result * part + 1.0f;
    const ints exponent = __builtin_convertvector(whole, ints) << 23;
    return NAME(choose)(vanishes, (vec){0}, (vec)((ints)result + exponent));
}

INLINE vec NAME(from_bfloat16)(const void *from) {
    halves stored;
    memcpy(&stored, from, sizeof stored);
    return (vec)(__builtin_convertvector(stored, words) << 16);
}

INLINE ints NAME(load_ints)(const int32_t *from) {
    ints value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE vec NAME(larger)(vec a, vec b) { return NAME(choose)(a > b, a, b); }

/* --- what is stored, as floats ----------------------------------------------------------------------------------- */

INLINE vec NAME(from_float16)(const void *from) {
    halves stored;
    memcpy(&stored, from, sizeof stored);
    const words wide = __builtin_convertvector(stored, words), size = wide & 0x7fff;
    const vec finite = (vec)(size << 13) * 0x1p112f;
    const vec value = NAME(choose)((ints)(size >= 0x7c00), (vec)((size << 13) | 0x7f800000), finite);
    return (vec)((words)value | (wide & 0x8000) << 16);
}

INLINE vec NAME(from_int8)(const void *from) {
    bytes stored;
    memcpy(&stored, from, sizeof stored);
    const shorts wider = __builtin_convertvector(stored, shorts); /* in one step GCC 12 converts one by one */
    return __builtin_convertvector(__builtin_convertvector(wider, ints), vec);
}

INLINE void NAME(copy_row)(const void *row, int kind, long dim, float *copy) {
    long i = 0;
    if (kind == FLOAT32)
        for (; i + LANES <= dim; i += LANES) NAME(store)(copy + i, NAME(load)((const float *)row + i));
    else if (kind == BFLOAT16)
        for (; i + LANES <= dim; i += LANES) NAME(store)(copy + i, NAME(from_bfloat16)((const uint16_t *)row + i));
    else if (kind == FLOAT16)
        for (; i + LANES <= dim; i += LANES) NAME(store)(copy + i, NAME(from_float16)((const uint16_t *)row + i));
    else
        for (; i + LANES <= dim; i += LANES) NAME(store)(copy + i, NAME(from_int8)((const int8_t *)row + i));
    for (; i < dim; i++) copy[i] = element(row, kind, i);
}

/* --- scores as the layer defines them ---------------------------------------------------------------------------- */

/* Products of queries and keys become scores, in units of log 2. */
INLINE vec NAME(score)(const Layer *layer, vec product) {
    if (layer->soft_cap > 0.0f) {
        const float cap = layer->soft_cap * LOG2_E; /* cap * tanh(x), where the product is 2 * log2(e) * x */
        product = cap - 2.0f * cap / (NAME(power)(product) + 1.0f);
    }
    return product;
}

INLINE vec NAME(hide)(const Layer *layer, vec score, ints position, ints first, ints last) {
    const ints seen = ((position >= first) | (position < (int32_t)layer->sink_tokens)) & (position <= last);
    return NAME(choose)(seen, score, NAME(all)(-INFINITY));
}

/* Scores of one vector of rows become weights, in units of the highest score so far. `kept` is left of what was before. */
INLINE void NAME(weigh)(const Layer *layer, const Rows *rows, const Tile *tile, long row) {
    const ints first = NAME(load_ints)(rows->first + row), last = NAME(load_ints)(rows->last + row);
    const vec before = NAME(load)(rows->highest + row);
    vec highest = before, total = (vec){0};
    float *scores = tile->scores + row;
    for (long key = 0; key < tile->num_keys; key++) {
        const ints position = tile->positions[key] - (ints){0};
        float *at = scores + key * rows->padded;
        vec score = NAME(score)(layer, NAME(load)(at));
        if (tile->masked) score = NAME(hide)(layer, score, position, first, last);
        highest = NAME(larger)(score, highest);
        NAME(store)(at, score);
    }
    for (long key = 0; key < tile->num_keys; key++) {
        float *at = scores + key * rows->padded;
        const vec weight = NAME(power)(NAME(load)(at) - highest);
        total += weight;
        NAME(store)(at, weight);
    }
    const vec kept = NAME(power)(before - highest);
    NAME(store)(rows->kept + row, kept);
    NAME(store)(rows->highest + row, highest);
    NAME(store)(rows->total + row, NAME(load)(rows->total + row) * kept + total);
}

/* Multiplies scores by the scales [key][head] of what is stored. */
INLINE void NAME(scale)(const Rows *rows, const Tile *tile, const float *scales) {
    for (long key = 0; key < tile->num_keys; key++)
        for (long head = 0; head < rows->num_heads; head++) {
            float *scores = tile->scores + key * rows->padded + head * rows->of_head;
            for (long row = 0; row < rows->of_head; row++) scores[row] *= scales[key * rows->num_heads + head];
        }
}

INLINE void NAME(weigh_all)(const Layer *layer, const Rows *rows, const Tile *tile) {
    if (layer->k.scales != NULL) NAME(scale)(rows, tile, tile->key_scales);
    for (long row = 0; row < rows->padded; row += LANES) NAME(weigh)(layer, rows, tile, row);
    if (layer->v.scales != NULL) NAME(scale)(rows, tile, tile->value_scales);
}

/* --- many rows: a number for each row in a vector ---------------------------------------------------------------- */

/* The products [key][row] of AT_ONCE keys with `vectors` vectors of rows. `q` is [element][row]. */
INLINE void NAME(multiply_keys)(const Rows *rows, const float *q, const float *const *keys, long dim, float *products,
                                const int vectors) {
    vec sums[AT_ONCE][VECTORS];
#pragma GCC unroll 8
    for (int key = 0; key < AT_ONCE; key++)
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) sums[key][i] = (vec){0};
    for (long d = 0; d < dim; d++, q += rows->padded) {
        vec query[VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) query[i] = NAME(load)(q + i * LANES);
#pragma GCC unroll 8
        for (int key = 0; key < AT_ONCE; key++)
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++) sums[key][i] += query[i] * keys[key][d];
    }
#pragma GCC unroll 8
    for (int key = 0; key < AT_ONCE; key++)
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) NAME(store)(products + key * rows->padded + i * LANES, sums[key][i]);
}

/* Adds the weighted elements [d, d + dims) of all values to `out` [element][row], of which `kept` is left. */
INLINE void NAME(add_values)(const Rows *rows, const Tile *tile, long row, long d, const int dims, const int vectors) {
    const float *weights = tile->scores + row, *kept = rows->kept + row;
    float *out = rows->out + d * rows->padded + row;
    vec sums[AT_ONCE][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < dims; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++)
            sums[i][j] = NAME(load)(out + i * rows->padded + j * LANES) * NAME(load)(kept + j * LANES);
    for (long key = 0; key < tile->num_keys; key++, weights += rows->padded) {
        const float *value = tile->values[key] + d;
        vec weight[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) weight[j] = NAME(load)(weights + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < dims; i++)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) sums[i][j] += weight[j] * value[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < dims; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) NAME(store)(out + i * rows->padded + j * LANES, sums[i][j]);
}

TARGET static void NAME(attend_many)(const Layer *layer, const Rows *rows, const Tile *tile) {
    const long step = VECTORS * LANES, dim = layer->head_dim;
    for (long row = 0, count; row < rows->padded; row += count) {
        count = row + step <= rows->padded ? step : LANES;
        for (long key = 0; key < tile->num_keys; key += AT_ONCE) {
            float *scores = tile->scores + key * rows->padded + row;
            if (count == step)
                NAME(multiply_keys)(rows, rows->q + row, tile->keys + key, dim, scores, VECTORS);
            else
                NAME(multiply_keys)(rows, rows->q + row, tile->keys + key, dim, scores, 1);
        }
    }
    NAME(weigh_all)(layer, rows, tile);
    for (long row = 0, count; row < rows->padded; row += count) {
        count = row + step <= rows->padded ? step : LANES;
        for (long d = 0, dims; d < layer->v_dim; d += dims) {
            dims = d + AT_ONCE <= layer->v_dim ? AT_ONCE : 1;
            if (count == step && dims > 1)
                NAME(add_values)(rows, tile, row, d, AT_ONCE, VECTORS);
            else if (count == step)
                NAME(add_values)(rows, tile, row, d, 1, VECTORS);
            else if (dims > 1)
                NAME(add_values)(rows, tile, row, d, AT_ONCE, 1);
            else
                NAME(add_values)(rows, tile, row, d, 1, 1);
        }
    }
}

/* --- few rows: elements of a head in a vector -------------------------------------------------------------------- */

/* A vector of the sums of LANES vectors. */
INLINE vec NAME(sums_of)(vec *parts) {
#pragma GCC unroll 8
    for (int count = LANES / 2; count > 0; count /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < count; i++)
            parts[i] = EVEN_LANES(parts[2 * i], parts[2 * i + 1]) + ODD_LANES(parts[2 * i], parts[2 * i + 1]);
    return parts[0];
}

/* Sums to be added up of the products of `num_rows` rows with a key. */
INLINE void NAME(multiply_rows)(const float *q, const float *key, long dim, vec *parts, const int num_rows) {
    vec sums[ROWS_AT_ONCE];
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; row++) sums[row] = (vec){0};
    for (long d = 0; d < dim; d += LANES) {
        const vec part = NAME(load)(key + d);
#pragma GCC unroll 8
        for (int row = 0; row < num_rows; row++) sums[row] += NAME(load)(q + row * dim + d) * part;
    }
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; row++) parts[row] = sums[row];
}

/* The products of one key of each head with all rows. A key is read once, from its first head to its last. */
INLINE void NAME(multiply_key)(const Layer *layer, const Rows *rows, const Tile *tile, long number) {
    const long dim = layer->head_dim;
    const float *key = tile->keys[number], *q = rows->q;
    vec *parts = tile->parts;
    for (long head = 0; head < rows->num_heads; head++, key += tile->key_step) {
        long left = rows->of_head;
        for (; left >= 4; left -= 4, q += 4 * dim, parts += 4) NAME(multiply_rows)(q, key, dim, parts, 4);
        if (left == 3) NAME(multiply_rows)(q, key, dim, parts, 3);
        if (left == 2) NAME(multiply_rows)(q, key, dim, parts, 2);
        if (left == 1) NAME(multiply_rows)(q, key, dim, parts, 1);
        q += left * dim, parts += left;
    }
    parts = tile->parts;
    for (long row = 0; row < rows->padded; row += LANES)
        NAME(store)(tile->scores + number * rows->padded + row, NAME(sums_of)(parts + row));
}

/* Adds the weighted elements [d, d + vectors * LANES) of all values of a head to `num_rows` rows of it. */
INLINE void NAME(add_to_rows)(const Layer *layer, const Rows *rows, const Tile *tile, long head, long row, long d,
                              const int num_rows, const int vectors) {
    const float *weights = tile->scores + row;
    float *out = rows->out + row * layer->v_dim + d;
    const long from = head * tile->value_step + d;
    vec sums[ROWS_AT_ONCE][COLUMNS];
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) sums[i][j] = NAME(load)(out + i * layer->v_dim + j * LANES) * rows->kept[row + i];
    for (long key = 0; key < tile->num_keys; key++, weights += rows->padded) {
        vec value[COLUMNS];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) value[j] = NAME(load)(tile->values[key] + from + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) sums[i][j] += value[j] * weights[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) NAME(store)(out + i * layer->v_dim + j * LANES, sums[i][j]);
}

INLINE void NAME(add_all)(const Layer *layer, const Rows *rows, const Tile *tile, long head, long row, const int num_rows) {
    long d = 0;
    for (; d + COLUMNS * LANES <= layer->v_dim; d += COLUMNS * LANES)
        NAME(add_to_rows)(layer, rows, tile, head, row, d, num_rows, COLUMNS);
    for (; d < layer->v_dim; d += LANES) NAME(add_to_rows)(layer, rows, tile, head, row, d, num_rows, 1);
}

TARGET static void NAME(attend_few)(const Layer *layer, const Rows *rows, const Tile *tile) {
    for (long key = 0; key < tile->num_keys; key++) NAME(multiply_key)(layer, rows, tile, key);
    NAME(weigh_all)(layer, rows, tile);
    for (long head = 0, row = 0; head < rows->num_heads; head++) {
        const long end = row + rows->of_head;
        for (; row + 4 <= end; row += 4) NAME(add_all)(layer, rows, tile, head, row, 4);
        if (end - row == 3) NAME(add_all)(layer, rows, tile, head, row, 3);
        if (end - row == 2) NAME(add_all)(layer, rows, tile, head, row, 2);
        if (end - row == 1) NAME(add_all)(layer, rows, tile, head, row, 1);
        row = end;
    }
}

/* Copies keys or values of the heads of a tile as floats, side by side. */
INLINE void NAME(copy_rows)(const Stored *stored, const Rows *rows, const Tile *tile, long dim, float *copies,
                            const float **pointers) {
    for (long i = 0; i < tile->num_keys; i++) {
        pointers[i] = copies;
        for (long head = rows->first_head; head < rows->first_head + rows->num_heads; head++, copies += dim)
            NAME(copy_row)(stored_row(stored, tile->blocks[i], tile->tokens[i], head), stored->kind, dim, copies);
    }
}

TARGET static void NAME(copy_tile)(const Layer *layer, const Rows *rows, const Tile *tile) {
    NAME(copy_rows)(&layer->k, rows, tile, layer->head_dim, tile->key_copies, tile->keys);
    NAME(copy_rows)(&layer->v, rows, tile, layer->v_dim, tile->value_copies, tile->values);
}

static const Kernel NAME(kernel) = {LANES, NAME(copy_tile), NAME(attend_many), NAME(attend_few)};

#undef shorts
#undef bytes
#undef VECTORS
#undef AT_ONCE
#undef COLUMNS
#undef EVEN_LANES
#undef ODD_LANES
#undef vec
#undef ints
#undef words
#undef halves
#undef INLINE
#undef LANES
#undef TARGET
#undef NAME
