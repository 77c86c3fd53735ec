/* attend(...): attention over K and V where they lie in their blocks, on a CPU. Nothing is gathered first.

   `attention/cpu_backend.py` plans what is computed here. A piece of work is some queries of one sequence (or of several
   that share a prefix) and a range of their keys. Its keys are read in tiles, whatever the layout, the size of blocks and
   the stored type are. Scores, weights and sums are float32. Results of pieces that have only a part of the keys of their
   queries are merged at the end. The arithmetic is in `_paged_attention.h`. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef __GNUC__
#error "vectors are written in the form that GCC and Clang know"
#endif

#define LOG2_E 1.44269504088896341f
#define LOWEST -1e30f    /* the highest score where there is none yet */
#define MANY_ROWS_KEYS 64 /* keys that are read at a time; AT_ONCE divides it */
#define FEW_ROWS_KEYS 16 /* so that all heads of these keys lie in pages whose addresses the processor remembers */
#define ROWS_AT_ONCE 4   /* of few rows */
#define MOST_THREADS 256
#define THREAD_WORK 4e6 /* multiplications for which another thread is started */

enum { FLOAT32, BFLOAT16, FLOAT16, INT8 };

/* K or V of all blocks; strides are in elements. */
typedef struct {
    const char *data;
    int kind;
    Py_ssize_t block, token, head;
    const uint16_t *scales; /* float16, of INT8 */
    Py_ssize_t scale_block, scale_token, scale_head;
} Stored;

/* Queries or results. */
typedef struct {
    char *data;
    int kind;
    Py_ssize_t token, head;
} Packed;

typedef struct {
    int32_t row, first, last; /* of the packed queries; the first and last position that it sees */
} Query;

typedef struct {
    int64_t first_query, num_queries; /* among the queries of the plan */
    int64_t table;                    /* where the list of blocks begins */
    int64_t gap;                      /* positions that the list leaves out after the sinks */
    int64_t sinks, start, end;        /* listed keys [0, sinks) and [start, end) */
    int64_t partial;                  /* where to leave the partial result of the first query; -1: it is the result */
} Piece;

typedef struct {
    int32_t row, partial;
} Merge;

/* One call: a layer, and what is computed of it. */
typedef struct {
    Py_ssize_t q_heads, kv_heads, group, head_dim, v_dim, block_size, sink_tokens, sink_slots;
    float scale, soft_cap;            /* 0: scores have no bound */
    const float *sink_logits; /* of query heads; NULL: none */
    Packed q, out;
    Stored k, v;
    const int32_t *indices;
    const Query *queries;
    const Piece *pieces;
    Py_ssize_t num_pieces, num_partials;
    float *partials; /* of each query and head: the highest score, the sum of weights, the values */
    atomic_long next_task;
    atomic_int failed;
} Layer;

/* The rows of a piece, and what is known of them so far: of each KV head, the heads of its group for each query. With many
   rows, `q` and `out` are [element][row], otherwise [row][element]. `padded` is a whole number of vectors. */
typedef struct {
    int few;
    long first_head, num_heads, of_head, count, padded;
    int32_t *first, *last; /* positions that it sees */
    float *q, *out, *highest, *total, *kept;
} Rows;

/* Some keys of a piece: where they lie, and then what they are. */
typedef struct {
    long size, num_keys;
    int masked; /* some row does not see some key */
    int32_t *blocks, *tokens, *positions;
    const float **keys, **values; /* of the first head */
    long key_step, value_step;    /* from one head to the next */
    float *key_scales, *value_scales, *key_copies, *value_copies, *scores;
    void *parts; /* a vector for each of few rows */
} Tile;

typedef struct {
    int lanes;
    void (*copy_tile)(const Layer *, const Rows *, const Tile *);
    void (*attend_many)(const Layer *, const Rows *, const Tile *);
    void (*attend_few)(const Layer *, const Rows *, const Tile *);
} Kernel;

/* --- single numbers ---------------------------------------------------------------------------------------------- */

static float bits_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t float_as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float16_as_float(uint16_t half) {
    const uint32_t size = half & 0x7fffu;
    const float value = size >= 0x7c00u ? bits_as_float(size << 13 | 0x7f800000u) : bits_as_float(size << 13) * 0x1p112f;
    return half & 0x8000u ? -value : value;
}

static float element(const void *data, int kind, Py_ssize_t i) {
    if (kind == FLOAT32) return ((const float *)data)[i];
    if (kind == BFLOAT16) return bits_as_float((uint32_t)((const uint16_t *)data)[i] << 16);
    if (kind == FLOAT16) return float16_as_float(((const uint16_t *)data)[i]);
    return ((const int8_t *)data)[i];
}

/* Both round to the nearest, and to even in the middle. */
static uint16_t as_bfloat16(float value) {
    const uint32_t bits = float_as_bits(value);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t as_float16(float value) {
    const uint32_t bits = float_as_bits(value), sign = bits >> 16 & 0x8000u;
    const float size = bits_as_float(bits & 0x7fffffffu);
    if (size != size) return (uint16_t)(sign | 0x7e00u);
    if (size >= 65520.0f) return (uint16_t)(sign | 0x7c00u);
    if (size < 0x1p-14f) /* steps of 2**-24, which floats above 0.5 have, too */
        return (uint16_t)(sign | (float_as_bits(size + 0.5f) - float_as_bits(0.5f)));
    const uint32_t rounded = float_as_bits(size) + 0xfff + (float_as_bits(size) >> 13 & 1);
    return (uint16_t)(sign | (rounded - (112u << 23)) >> 13);
}

static void put(void *data, int kind, Py_ssize_t i, float value) {
    if (kind == FLOAT32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = kind == BFLOAT16 ? as_bfloat16(value) : as_float16(value);
}

/* What sums are multiplied by: 0 for a row that sees nothing. */
static float share_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

static Py_ssize_t item_size(int kind) { return kind == FLOAT32 ? 4 : kind == INT8 ? 1 : 2; }

static void *packed_row(const Packed *packed, Py_ssize_t token, Py_ssize_t head) {
    return packed->data + (token * packed->token + head * packed->head) * item_size(packed->kind);
}

static const void *stored_row(const Stored *stored, long block, long token, long head) {
    return stored->data + (block * stored->block + token * stored->token + head * stored->head) * item_size(stored->kind);
}

static float stored_scale(const Stored *stored, long block, long token, long head) {
    if (stored->scales == NULL) return 1.0f;
    return float16_as_float(
        stored->scales[block * stored->scale_block + token * stored->scale_token + head * stored->scale_head]);
}

/* --- the instruction sets ---------------------------------------------------------------------------------------- */

#if defined(__x86_64__)

#define NAME(x) x##_avx512
#define LANES 16
#define VECTORS 3
#define AT_ONCE 8
#define COLUMNS 4
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define EVEN_LANES(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD_LANES(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#include "_paged_attention.h"

#define NAME(x) x##_avx2
#define LANES 8
#define VECTORS 2
#define AT_ONCE 4
#define COLUMNS 2
#define TARGET __attribute__((target("avx2,fma")))
#define EVEN_LANES(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD_LANES(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#include "_paged_attention.h"

#endif

#define NAME(x) x##_plain
#define LANES 4
#ifdef __aarch64__ /* NEON: every processor has it, and 32 registers */
#define VECTORS 3
#define AT_ONCE 8
#define COLUMNS 4
#else
#define VECTORS 2
#define AT_ONCE 4
#define COLUMNS 2
#endif
#define TARGET
#define EVEN_LANES(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6)
#define ODD_LANES(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7)
#include "_paged_attention.h"

#include "_choices.h"

/* --- one piece of work ------------------------------------------------------------------------------------------- */

/* Memory of one thread: numbers are taken from it one array after another. */
typedef struct {
    char *memory;
    size_t used;
} Scratch;

static void *take(Scratch *scratch, long count, size_t item) {
    void *taken = scratch->memory == NULL ? NULL : scratch->memory + scratch->used;
    scratch->used += ((size_t)count * item + 63) / 64 * 64;
    return taken;
}

static int is_few(const Kernel *kernel, const Layer *layer, const Piece *piece) {
    const int whole_vectors = layer->head_dim % kernel->lanes == 0 && layer->v_dim % kernel->lanes == 0;
    return whole_vectors && piece->num_queries * layer->group <= kernel->lanes / 2;
}

/* The shape of a piece's rows and tiles, and memory for them. */
static void lay_out(const Kernel *kernel, const Layer *layer, const Piece *piece, Scratch *scratch, Rows *rows, Tile *tile) {
    rows->of_head = piece->num_queries * layer->group;
    rows->count = rows->of_head * rows->num_heads;
    rows->padded = (rows->count + kernel->lanes - 1) / kernel->lanes * kernel->lanes;
    tile->size = rows->few ? FEW_ROWS_KEYS : MANY_ROWS_KEYS;
    const long n = rows->padded, keys = tile->size, all = keys * rows->num_heads;
    rows->first = take(scratch, n, 4), rows->last = take(scratch, n, 4);
    rows->highest = take(scratch, n, 4), rows->total = take(scratch, n, 4);
    rows->kept = take(scratch, n, 4);
    rows->q = take(scratch, n * layer->head_dim, 4), rows->out = take(scratch, n * layer->v_dim, 4);
    tile->blocks = take(scratch, keys, 4), tile->tokens = take(scratch, keys, 4), tile->positions = take(scratch, keys, 4);
    tile->keys = take(scratch, keys, sizeof(float *)), tile->values = take(scratch, keys, sizeof(float *));
    tile->key_scales = take(scratch, all, 4), tile->value_scales = take(scratch, all, 4);
    tile->key_copies = take(scratch, all * layer->head_dim, 4), tile->value_copies = take(scratch, all * layer->v_dim, 4);
    tile->scores = take(scratch, keys * n, 4);
    tile->parts = take(scratch, rows->few ? n * kernel->lanes : 0, 4);
}

/* The query and the query head of a row. */
static const Query *query_of(const Layer *layer, const Piece *piece, const Rows *rows, long row, long *q_head) {
    const long in_head = row % rows->of_head;
    *q_head = (rows->first_head + row / rows->of_head) * layer->group + in_head % layer->group;
    return &layer->queries[piece->first_query + in_head / layer->group];
}

/* Copies the queries, scaled, and begins their sums. Rows beyond the last see nothing. */
static void begin_rows(const Layer *layer, const Piece *piece, const Rows *rows) {
    const float scale = (layer->soft_cap > 0.0f ? 2.0f * layer->scale / layer->soft_cap : layer->scale) * LOG2_E;
    const long dim = layer->head_dim, step = rows->few ? 1 : rows->padded;
    memset(rows->out, 0, (size_t)(rows->padded * layer->v_dim) * sizeof(float));
    for (long row = 0; row < rows->count; row++) {
        long q_head;
        const Query *query = query_of(layer, piece, rows, row, &q_head);
        const int with_sink = layer->sink_logits != NULL && piece->partial < 0;
        const void *from = packed_row(&layer->q, query->row, q_head);
        float *to = rows->q + (rows->few ? row * dim : row);
        rows->first[row] = query->first, rows->last[row] = query->last;
        rows->highest[row] = with_sink ? layer->sink_logits[q_head] * LOG2_E : LOWEST;
        rows->total[row] = with_sink ? 1.0f : 0.0f;
        for (long d = 0; d < dim; d++) to[d * step] = element(from, layer->q.kind, d) * scale;
    }
    for (long row = rows->count; row < rows->padded; row++) {
        rows->first[row] = rows->last[row] = 0;
        rows->highest[row] = rows->total[row] = 0.0f;
        for (long d = 0; d < dim && !rows->few; d++) rows->q[row + d * step] = 0.0f;
    }
}

/* Writes the results, or leaves them to be merged. */
static void end_rows(const Layer *layer, const Piece *piece, const Rows *rows) {
    const long dim = layer->v_dim, step = rows->few ? 1 : rows->padded;
    for (long row = 0; row < rows->count; row++) {
        long q_head;
        const Query *query = query_of(layer, piece, rows, row, &q_head);
        const float *from = rows->out + (rows->few ? row * dim : row);
        if (piece->partial >= 0) {
            const long number = piece->partial + (query - &layer->queries[piece->first_query]);
            float *to = layer->partials + (number * layer->q_heads + q_head) * (dim + 2);
            to[0] = rows->highest[row], to[1] = rows->total[row];
            for (long d = 0; d < dim; d++) to[2 + d] = from[d * step];
        } else {
            const float share = share_of(rows->total[row]);
            void *to = packed_row(&layer->out, query->row, q_head);
            for (long d = 0; d < dim; d++) put(to, layer->out.kind, d, from[d * step] * share);
        }
    }
}

/* Finds where the keys from number `from` on lie, a tile of them at most. */
static void place_keys(const Layer *layer, const Piece *piece, Tile *tile, long from) {
    const long left = piece->sinks + piece->end - piece->start - from;
    tile->num_keys = left < tile->size ? left : tile->size;
    for (long i = 0; i < tile->num_keys; i++) {
        const int64_t key = from + i, listed = key < piece->sinks ? key : key - piece->sinks + piece->start;
        tile->blocks[i] = layer->indices[piece->table + listed / layer->block_size];
        tile->tokens[i] = (int32_t)(listed % layer->block_size);
        tile->positions[i] = (int32_t)(listed + (listed >= layer->sink_slots ? piece->gap : 0));
    }
}

/* Whether some row does not see some key of a tile. */
static int is_masked(const Rows *rows, const Tile *tile) {
    int32_t first = INT32_MIN, last = INT32_MAX, lowest = INT32_MAX, highest = INT32_MIN;
    for (long row = 0; row < rows->count; row++) {
        first = rows->first[row] > first ? rows->first[row] : first;
        last = rows->last[row] < last ? rows->last[row] : last;
    }
    for (long i = 0; i < tile->num_keys; i++) {
        lowest = tile->positions[i] < lowest ? tile->positions[i] : lowest;
        highest = tile->positions[i] > highest ? tile->positions[i] : highest;
    }
    return lowest < first || highest > last;
}

static void read_scales(const Stored *stored, const Rows *rows, const Tile *tile, float *scales) {
    if (stored->scales == NULL) return;
    for (long i = 0; i < tile->num_keys; i++)
        for (long head = 0; head < rows->num_heads; head++)
            *scales++ = stored_scale(stored, tile->blocks[i], tile->tokens[i], rows->first_head + head);
}

/* Points at the keys and values of a tile as floats: where they lie, or at copies. Keys and values that many rows share are
   copied anyway: at equal distances of a power of two they would push each other out of the nearest cache. */
static void read_tile(const Kernel *kernel, const Layer *layer, const Rows *rows, Tile *tile) {
    if (!rows->few || layer->k.kind != FLOAT32) {
        tile->key_step = layer->head_dim, tile->value_step = layer->v_dim;
        kernel->copy_tile(layer, rows, tile);
    } else {
        tile->key_step = layer->k.head, tile->value_step = layer->v.head;
        for (long i = 0; i < tile->num_keys; i++) {
            tile->keys[i] = stored_row(&layer->k, tile->blocks[i], tile->tokens[i], rows->first_head);
            tile->values[i] = stored_row(&layer->v, tile->blocks[i], tile->tokens[i], rows->first_head);
        }
    }
    for (long i = tile->num_keys; i < tile->size; i++) tile->keys[i] = tile->keys[0]; /* for products that nobody reads */
    read_scales(&layer->k, rows, tile, tile->key_scales);
    read_scales(&layer->v, rows, tile, tile->value_scales);
}

static void attend_piece(const Kernel *kernel, const Layer *layer, const Piece *piece, Scratch *scratch, Rows rows) {
    const long num_keys = piece->sinks + piece->end - piece->start;
    Tile tile = {0};
    scratch->used = 0;
    lay_out(kernel, layer, piece, scratch, &rows, &tile);
    begin_rows(layer, piece, &rows);
    memset(tile.parts, 0, rows.few ? (size_t)(rows.padded * kernel->lanes) * sizeof(float) : 0);
    for (long from = 0; from < num_keys; from += tile.size) {
        place_keys(layer, piece, &tile, from);
        tile.masked = is_masked(&rows, &tile);
        read_tile(kernel, layer, &rows, &tile);
        (rows.few ? kernel->attend_few : kernel->attend_many)(layer, &rows, &tile);
    }
    end_rows(layer, piece, &rows);
}

/* --- all pieces, on several threads ------------------------------------------------------------------------------ */

typedef struct {
    const Kernel *kernel;
    Layer *layer;
    long heads_at_once; /* of pieces with few rows, whose blocks are then read from one end to the other */
    size_t scratch_size;
} Job;

static Rows rows_of(const Job *job, const Piece *piece, long head) {
    const int few = is_few(job->kernel, job->layer, piece);
    return (Rows){.few = few, .first_head = head, .num_heads = few ? job->heads_at_once : 1};
}

static size_t scratch_size(const Job *job) {
    size_t most = 0;
    for (Py_ssize_t i = 0; i < job->layer->num_pieces; i++) {
        const Piece *piece = &job->layer->pieces[i];
        Scratch scratch = {NULL, 0};
        Rows rows = rows_of(job, piece, 0);
        Tile tile;
        lay_out(job->kernel, job->layer, piece, &scratch, &rows, &tile);
        most = scratch.used > most ? scratch.used : most;
    }
    return most;
}

/* A task is a piece and a KV head. Where a piece takes several heads at once, the task of the first does it. */
static void *do_tasks(void *given) {
    const Job *job = given;
    Layer *layer = job->layer;
    Scratch scratch = {NULL, 0};
    if (posix_memalign((void **)&scratch.memory, 64, job->scratch_size + 64)) {
        atomic_store(&layer->failed, 1);
        return NULL;
    }
    const long num_tasks = layer->num_pieces * layer->kv_heads;
    for (long task; (task = atomic_fetch_add(&layer->next_task, 1)) < num_tasks;) {
        const Piece *piece = &layer->pieces[task / layer->kv_heads];
        const Rows rows = rows_of(job, piece, task % layer->kv_heads);
        if (rows.first_head % rows.num_heads == 0) attend_piece(job->kernel, layer, piece, &scratch, rows);
    }
    free(scratch.memory);
    return NULL;
}

static long threads_worth_it(const Layer *layer, long threads) {
    double work = 0.0;
    for (Py_ssize_t i = 0; i < layer->num_pieces; i++) {
        const Piece *piece = &layer->pieces[i];
        work += (double)(piece->sinks + piece->end - piece->start) * (double)piece->num_queries;
    }
    work *= (double)(layer->q_heads * (layer->head_dim + layer->v_dim));
    const double most = work / THREAD_WORK;
    if (most < (double)threads) threads = (long)most;
    return threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
}

static void attend_all(const Kernel *kernel, Layer *layer, long threads) {
    threads = threads_worth_it(layer, threads);
    Job job = {kernel, layer, layer->num_pieces >= 2 * threads || threads == 1 ? layer->kv_heads : 1, 0};
    job.scratch_size = scratch_size(&job);
    pthread_t others[MOST_THREADS];
    long started = 0;
    while (started < threads - 1 && pthread_create(&others[started], NULL, do_tasks, &job) == 0) started++;
    do_tasks(&job);
    for (long i = 0; i < started; i++) pthread_join(others[i], NULL);
}

/* Merges the partial results of each query, which stand one after another in `merges`. */
static void merge_all(const Layer *layer, const Merge *merges, Py_ssize_t count) {
    const Py_ssize_t size = layer->v_dim + 2;
    for (Py_ssize_t begin = 0, end; begin < count; begin = end) {
        for (end = begin; end < count && merges[end].row == merges[begin].row;) end++;
        for (Py_ssize_t head = 0; head < layer->q_heads; head++) {
            float *into = layer->partials + (merges[begin].partial * layer->q_heads + head) * size;
            const float sink = layer->sink_logits == NULL ? LOWEST : layer->sink_logits[head] * LOG2_E;
            float highest = sink, total = layer->sink_logits == NULL ? 0.0f : 1.0f;
            for (Py_ssize_t i = begin; i < end; i++) {
                const float *part = layer->partials + (merges[i].partial * layer->q_heads + head) * size;
                highest = part[0] > highest ? part[0] : highest;
            }
            total *= exp2f(sink - highest);
            for (Py_ssize_t i = begin; i < end; i++) {
                const float *part = layer->partials + (merges[i].partial * layer->q_heads + head) * size;
                const float kept = exp2f(part[0] - highest);
                total += part[1] * kept;
                for (Py_ssize_t d = 0; d < layer->v_dim; d++)
                    into[2 + d] = part[2 + d] * kept + (i > begin ? into[2 + d] : 0.0f);
            }
            void *to = packed_row(&layer->out, merges[begin].row, head);
            const float share = share_of(total);
            for (Py_ssize_t d = 0; d < layer->v_dim; d++) put(to, layer->out.kind, d, into[2 + d] * share);
        }
    }
}

/* One call, whole; 0 if there is no memory for it. */
static int attend_and_merge(const Kernel *kernel, Layer *layer, const Merge *merges, Py_ssize_t num_merges, long threads) {
    const size_t partial = (size_t)layer->q_heads * (size_t)(layer->v_dim + 2) * sizeof(float);
    layer->partials = malloc(partial * (size_t)layer->num_partials + 1);
    if (layer->partials == NULL) return 0;
    attend_all(kernel, layer, threads);
    if (!atomic_load(&layer->failed)) merge_all(layer, merges, num_merges);
    free(layer->partials);
    return !atomic_load(&layer->failed);
}

/* --- Python ------------------------------------------------------------------------------------------------------ */

static const char *ATTEND_DOC =
    "attend(instructions, q, out, k, v, sink_logits, shape, scores, indices, queries, pieces, merges, num_partials,\n"
    "       threads)\n\n"
    "q, out: (address, kind, token stride, head stride). k, v: (address, kind, block, token and head stride, address of\n"
    "scales, their strides). shape: (query heads, KV heads, head dim, v dim, block size, sink tokens, sink slots).\n"
    "scores: (scale, soft cap or 0). An address of 0 stands for nothing. The last arrays are those of a plan.";

static PyObject *attend(PyObject *module, PyObject *args) {
    Layer layer = {0};
    Py_buffer indices, queries, pieces, merges;
    const char *instructions;
    unsigned long long q, out, k, v, k_scales, v_scales, sink_logits;
    Py_ssize_t threads;
    (void)module;
    if (!PyArg_ParseTuple(args, "s(Kinn)(Kinn)(KinnnKnnn)(KinnnKnnn)K(nnnnnnn)(ff)y*y*y*y*nn", &instructions, &q,
                          &layer.q.kind, &layer.q.token, &layer.q.head, &out, &layer.out.kind, &layer.out.token,
                          &layer.out.head, &k, &layer.k.kind, &layer.k.block, &layer.k.token, &layer.k.head, &k_scales,
                          &layer.k.scale_block, &layer.k.scale_token, &layer.k.scale_head, &v, &layer.v.kind, &layer.v.block,
                          &layer.v.token, &layer.v.head, &v_scales, &layer.v.scale_block, &layer.v.scale_token,
                          &layer.v.scale_head, &sink_logits, &layer.q_heads, &layer.kv_heads, &layer.head_dim,
                          &layer.v_dim, &layer.block_size, &layer.sink_tokens, &layer.sink_slots, &layer.scale,
                          &layer.soft_cap, &indices, &queries, &pieces, &merges, &layer.num_partials, &threads))
        return NULL;
    layer.q.data = (char *)(uintptr_t)q, layer.out.data = (char *)(uintptr_t)out;
    layer.k.data = (const char *)(uintptr_t)k, layer.v.data = (const char *)(uintptr_t)v;
    layer.k.scales = (const uint16_t *)(uintptr_t)k_scales, layer.v.scales = (const uint16_t *)(uintptr_t)v_scales;
    layer.sink_logits = (const float *)(uintptr_t)sink_logits;
    layer.indices = indices.buf, layer.queries = queries.buf, layer.pieces = pieces.buf;
    layer.group = layer.q_heads / layer.kv_heads;
    layer.num_pieces = pieces.len / (Py_ssize_t)sizeof(Piece);
    const Kernel *kernel = kernel_named(instructions);
    if (kernel != NULL) {
        int done;
        Py_BEGIN_ALLOW_THREADS
        done = attend_and_merge(kernel, &layer, merges.buf, merges.len / (Py_ssize_t)sizeof(Merge), (long)threads);
        Py_END_ALLOW_THREADS
        if (!done) PyErr_NoMemory();
    }
    PyBuffer_Release(&indices);
    PyBuffer_Release(&queries);
    PyBuffer_Release(&pieces);
    PyBuffer_Release(&merges);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* Strides are in bytes. Nothing is written if a slot does not exist. */
static PyObject *write_rows(PyObject *module, PyObject *args) {
    unsigned long long rows, slots, target;
    long heads, size, count, from_row, from_head, num_blocks, block_size, block_stride, token_stride, head_stride;
    (void)module;
    if (!PyArg_ParseTuple(args, "(Kll)ll(Kl)(Klllll)", &rows, &from_row, &from_head, &heads, &size, &slots, &count, &target,
                          &num_blocks, &block_size, &block_stride, &token_stride, &head_stride))
        return NULL;
    const int64_t *slot = (const int64_t *)(uintptr_t)slots;
    for (long i = 0; i < count; i++)
        if (slot[i] >= (int64_t)num_blocks * block_size)
            return PyErr_Format(PyExc_IndexError, "slot %lld is not one of the %lld of the store", (long long)slot[i],
                                (long long)num_blocks * block_size);
    if (from_head == size && head_stride == size) size *= heads, heads = 1;
    Py_BEGIN_ALLOW_THREADS
    for (long i = 0; i < count; i++) {
        if (slot[i] < 0) continue;
        const char *from = (const char *)(uintptr_t)rows + i * from_row;
        char *to = (char *)(uintptr_t)target + slot[i] / block_size * block_stride + slot[i] % block_size * token_stride;
        for (long head = 0; head < heads; head++) memcpy(to + head * head_stride, from + head * from_head, (size_t)size);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"attend", attend, METH_VARARGS, NULL},
    {"write", write_rows, METH_VARARGS,
     "write((rows, bytes to the next, to the next head), heads, bytes of one, (slots, count), (target, blocks, tokens of a\n"
     "block, bytes to the next block, to the next token, to the next head)): copies rows into slots, and skips those below 0."},
    {"instructions", instructions, METH_NOARGS, "The instruction sets that this processor can run, the best first."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_paged_attention", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__paged_attention(void) {
    METHODS[0].ml_doc = ATTEND_DOC;
    return PyModule_Create(&MODULE);
}
