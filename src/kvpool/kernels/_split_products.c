/* multiply(...): x times the transpose of a weight that was packed before, float32, with the instructions of AMX.

   AMX multiplies matrices of bfloat16, sixteen times as many numbers at a time as other instructions do of float32, and adds
   in float32. A float32 is exactly the sum of three numbers in bfloat16: its first eight bits, the next, and the last. Of
   the nine products of two such sums three are below the last bit of the result. The other six take less than half the time
   of one product in float32, with many rows. Numbers below 2 to the power of -110 lose bits; infinite ones become NaN.

   Many weights are the sum of fewer parts: one if they were stored in bfloat16, two if in float16 or in four bits with a
   scale. Then three or five products give the same, and the copy is smaller. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 11)
#define HAS_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define SIDE 32            /* rows and columns that are multiplied at a time, and elements of them in a step */
#define TILE 512           /* numbers of a tile: 16 rows of 32 */
#define PARTS 3            /* in bfloat16, whose sum is a number */
#define PART (2 * TILE)    /* numbers of one part of SIDE rows or columns in a step */
#define STEP (PARTS * PART) /* of all parts */
#define LINE 64            /* bytes that memory gives at a time */
#define LINES(numbers) ((numbers) * 2 / LINE)
#define HEAD (LINE / 2)    /* numbers before a packed weight; the first is how many parts it has */
#define STEPS 32           /* that are multiplied at a time, so that they stay in a core's cache; more are added */
#define X_STEPS 200        /* blocks of rows of x times steps, which stay there, too */
#define THREAD_WORK 4e6    /* multiplications for which another thread is started */

/* A product [rows][columns] of x [rows][depth]. */
typedef struct {
    const float *x;
    const uint16_t *packed;
    float *out;
    long x_stride, rows, columns, depth;
    long parts; /* of the weight's numbers; all others are 0 */
    int failed; /* for want of memory */
} Product;

static long blocks_of(long count) { return (count + SIDE - 1) / SIDE; }

#ifdef HAS_AMX

#include "_threads.h"

#define NAME(x) x##_avx512
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,amx-tile,amx-bf16")))
#include "_vectors.h"

/* Splits SIDE numbers, of which `count` exist, into three parts. */
INLINE void split(const float *numbers, long count, uint16_t *first, uint16_t *second, uint16_t *third) {
    float all[SIDE] = {0};
    if (count < SIDE) numbers = memcpy(all, numbers, (size_t)(count < 0 ? 0 : count) * sizeof(float));
    uint16_t *parts[3] = {first, second, third};
    for (int i = 0; i < SIDE; i += LANES) {
        vec rest = NAME(load)(numbers + i);
        for (int part = 0; part < 3; part++) {
            const __m256bh rounded = _mm512_cvtneps_pbh((__m512)rest);
            memcpy(parts[part] + i, &rounded, sizeof rounded);
            rest -= NAME(from_bfloat16)(&rounded);
        }
    }
}

/* How many parts the numbers of a weight have, one after another in memory. */
TARGET static long parts_of(const float *numbers, long count) {
    long most = 1;
    for (long i = 0; i < count && most < PARTS; i += SIDE) {
        uint16_t parts[PARTS][SIDE], second = 0, third = 0;
        split(numbers + i, count - i, parts[0], parts[1], parts[2]);
        for (int j = 0; j < SIDE; j++) second |= parts[1][j], third |= parts[2][j];
        most = third ? 3 : second ? 2 : most;
    }
    return most;
}

/* Rows of x in steps [start, end), in the order in which tiles are loaded. Rows beyond the last are 0. */
TARGET static void pack_rows(const Product *product, long row, long count, long start, long end, uint16_t *packed) {
    for (long number = 0; number < blocks_of(count) * SIDE; number++) {
        const float *from = product->x + (row + number) * product->x_stride;
        uint16_t *to = packed + number / SIDE * (end - start) * STEP + number % SIDE * SIDE;
        for (long step = start; step < end; step++, to += STEP)
            split(from + step * SIDE, number < count ? product->depth - step * SIDE : 0, to, to + PART, to + 2 * PART);
    }
}

/* The same of columns. Tiles of the second factor have pairs of elements of all their columns side by side. */
TARGET static void pack_columns(const void *given, long first, long last) {
    const Product *weight = given;
    const long steps = blocks_of(weight->depth);
    for (long block = first; block < last; block++)
        for (long step = 0; step < steps; step++)
            for (long i = 0; i < SIDE; i++) {
                const long column = block * SIDE + i, element = step * SIDE;
                uint16_t parts[3][SIDE];
                uint16_t *to = (uint16_t *)(uintptr_t)weight->packed + (block * steps + step) * weight->parts * PART;
                split(weight->x + column * weight->depth + element, column < weight->columns ? weight->depth - element : 0,
                      parts[0], parts[1], parts[2]);
                to += i / 16 * TILE + i % 16 * 2;
                for (int part = 0; part < weight->parts; part++)
                    for (long pair = 0; pair < SIDE / 2; pair++)
                        memcpy(to + part * PART + pair * SIDE, parts[part] + 2 * pair, 2 * sizeof(uint16_t));
            }
}

/* Tiles 4 and 5 have one part of the rows, 6 and 7 one of the columns, 0 to 3 the sums. A tile is loaded as soon as the
   products that read it have begun, before other products: while another thread runs on the core, it does not begin loads
   early by itself, and waits for each that is needed at once. */
#define ROWS(tile, part) _tile_loadd(tile, rows + (part) * PART + (tile - 4) * TILE, 64)
#define COLUMNS(tile, part) _tile_loadd(tile, columns + (part) * PART + (tile - 6) * TILE, 64)
#define ADD(sum, row, column) _tile_dpbf16ps(sum, row, column)

/* Asks for one of `count` shares of the next step, into the first cache. */
INLINE void ask(const uint16_t *rows, const uint16_t *columns, long parts, int share, int count) {
    for (int line = share * LINES(STEP) / count; line < (share + 1) * LINES(STEP) / count; line++)
        __builtin_prefetch((const char *)rows + line * LINE, 0, 3);
    for (int line = share * LINES(parts * PART) / count; line < (share + 1) * LINES(parts * PART) / count; line++)
        __builtin_prefetch((const char *)columns + line * LINE, 0, 3);
}

/* The four tiles of sums: what is done to each, with its place. */
#define SUMS(operation)                                                 \
    operation(0, out, stride * (long)sizeof(float));                    \
    operation(1, out + SIDE / 2, stride * (long)sizeof(float));         \
    operation(2, out + SIDE / 2 * stride, stride * (long)sizeof(float)); \
    operation(3, out + SIDE / 2 * stride + SIDE / 2, stride * (long)sizeof(float))

/* SIDE rows times SIDE columns, `adds` to what is in `out`. Each pair of parts has one in common with the pair before.
   Meanwhile memory that is needed next is asked for, and that which will be written. */
INLINE void multiply_block(const uint16_t *rows, const uint16_t *columns, const int parts, long steps, const char *next,
                           long lines, int adds, float *out, long stride) {
    const int pairs = parts == 3 ? 6 : parts == 2 ? 5 : 3;
    if (adds) {
        SUMS(_tile_loadd);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    ROWS(4, 2); ROWS(5, 2); COLUMNS(6, 0); COLUMNS(7, 0);
    for (long step = 1; step <= steps; step++) {
        const long ahead = step < steps ? STEP : 0; /* the last step has none behind it, and loads its own again */
        const uint16_t *next_rows = rows + ahead, *next_columns = columns + ahead / PARTS * parts;
        for (long i = 0; i < lines; i++, next += LINE) __builtin_prefetch(next, 0, 2);
        for (long i = 2 * step - 2; i < smaller(2 * step, SIDE); i++) {
            __builtin_prefetch(out + i * stride, 1, 3);
            __builtin_prefetch(out + i * stride + SIDE / 2, 1, 3);
        }
        ask(next_rows, next_columns, parts, 0, pairs);
        ADD(0, 4, 6); ADD(1, 4, 7); ROWS(4, 1); ADD(2, 5, 6); ADD(3, 5, 7); ROWS(5, 1);
        ask(next_rows, next_columns, parts, 1, pairs);
        if (parts == 1) {
            ADD(0, 4, 6); ADD(1, 4, 7); ROWS(4, 0); ADD(2, 5, 6); ADD(3, 5, 7); ROWS(5, 0);
        } else {
            ADD(0, 4, 6); ADD(1, 4, 7); ADD(2, 5, 6); COLUMNS(6, 1); ADD(3, 5, 7); COLUMNS(7, 1);
            ask(next_rows, next_columns, parts, 2, pairs);
            ADD(0, 4, 6); ADD(2, 5, 6); ADD(1, 4, 7); ROWS(4, 0); ADD(3, 5, 7); ROWS(5, 0);
            ask(next_rows, next_columns, parts, 3, pairs);
            if (parts == 3) {
                ADD(0, 4, 6); ADD(1, 4, 7); ADD(2, 5, 6); COLUMNS(6, 2); ADD(3, 5, 7); COLUMNS(7, 2);
                ask(next_rows, next_columns, parts, 4, pairs);
            }
            ADD(0, 4, 6); ADD(2, 5, 6); COLUMNS(6, 0); ADD(1, 4, 7); ADD(3, 5, 7); COLUMNS(7, 0);
        }
        ask(next_rows, next_columns, parts, pairs - 1, pairs);
        rows = next_rows, columns = next_columns;
        ADD(0, 4, 6); ADD(2, 5, 6); COLUMNS(6, 0); ADD(1, 4, 7); ROWS(4, 2); ADD(3, 5, 7); COLUMNS(7, 0); ROWS(5, 2);
    }
    SUMS(_tile_stored);
}

/* `count` rows from `row` on, packed, times steps [start, end) of all columns. */
INLINE void multiply_parts(const Product *product, const int parts, const uint16_t *packed, long row, long count, long start,
                           long end) {
    const long steps = blocks_of(product->depth), num_blocks = blocks_of(product->columns), num_parts = blocks_of(count);
    const long each = (end - start) * STEP, each_columns = (end - start) * parts * PART;
    float sums[SIDE * SIDE];
    for (long block = 0; block < num_blocks; block++)
        for (long part = 0; part < num_parts; part++) {
            const long height = smaller(SIDE, count - part * SIDE), width = smaller(SIDE, product->columns - block * SIDE);
            const long lines = block + 1 < num_blocks ? LINES(parts * PART) / num_parts : 0;
            const uint16_t *columns = product->packed + (block * steps + start) * parts * PART;
            const char *next = (const char *)(columns + steps * parts * PART) + part * each_columns * 2 / num_parts;
            float *out = product->out + (row + part * SIDE) * product->columns + block * SIDE;
            if (height == SIDE && width == SIDE) {
                multiply_block(packed + part * each, columns, parts, end - start, next, lines, start > 0, out,
                               product->columns);
                continue;
            }
            multiply_block(packed + part * each, columns, parts, end - start, next, lines, 0, sums, SIDE);
            for (long i = 0; i < height; i++, out += product->columns)
                for (long j = 0; j < width; j++) out[j] = sums[i * SIDE + j] + (start > 0 ? out[j] : 0.0f);
        }
}

TARGET static void multiply_rows(const Product *product, const uint16_t *packed, long row, long count, long start, long end) {
    switch (product->parts) {
        case 1: multiply_parts(product, 1, packed, row, count, start, end); break;
        case 2: multiply_parts(product, 2, packed, row, count, start, end); break;
        default: multiply_parts(product, 3, packed, row, count, start, end);
    }
}

/* All eight tiles have 16 rows of 64 bytes. A constant: GCC takes what a function writes here for unused. */
static const struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} SHAPES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* Blocks [first, last) of SIDE rows. */
TARGET static void multiply_share(const void *given, long first, long last) {
    Product *product = (Product *)(uintptr_t)given;
    const long steps = blocks_of(product->depth), times = (steps + STEPS - 1) / STEPS, at_once = (steps + times - 1) / times;
    const long end = smaller(product->rows, last * SIDE), most = smaller(X_STEPS / at_once, last - first) * SIDE;
    uint16_t *packed = aligned_alloc(64, (size_t)(most / SIDE * at_once * STEP) * sizeof(uint16_t));
    if (packed == NULL) {
        product->failed = 1;
        return;
    }
    _tile_loadconfig(&SHAPES);
    for (long row = first * SIDE; row < end; row += most)
        for (long start = 0; start < steps; start += at_once) {
            const long count = smaller(most, end - row), stop = smaller(start + at_once, steps);
            pack_rows(product, row, count, start, stop, packed);
            multiply_rows(product, packed, row, count, start, stop);
        }
    _tile_release();
    free(packed);
}

/* Whether the processor has the instructions, and the kernel lets this process use them. */
static int is_available(void) {
    unsigned a, b, c, d;
    const unsigned tiles = 1u << 24 | 1u << 22; /* AMX-TILE and AMX-BF16 */
    const long ask = 0x1023, tile_data = 18;    /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    __builtin_cpu_init();
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tiles) == tiles && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, ask, tile_data) == 0;
}

static void pack_all(const Product *weight) { pack_columns(weight, 0, blocks_of(weight->columns)); }

static void multiply_all(Product *product, long threads) {
    const double work = (double)product->rows * (double)product->columns * (double)product->depth;
    in_threads(multiply_share, product, blocks_of(product->rows), work / THREAD_WORK, threads);
}

#else

static int is_available(void) { return 0; }
static long parts_of(const float *numbers, long count) { return (void)numbers, (void)count, PARTS; }
static void pack_all(const Product *weight) { (void)weight; }
static void multiply_all(Product *product, long threads) { (void)product, (void)threads; }

#endif

/* --- Python ------------------------------------------------------------------------------------------------------ */

/* The bytes of a packed weight. */
static long size_of(long columns, long depth, long parts) {
    return (HEAD + blocks_of(columns) * blocks_of(depth) * parts * PART) * (long)sizeof(uint16_t);
}

/* How many parts a packed weight of so many bytes has. */
static long parts_in(long size, long columns, long depth) {
    long parts = 1;
    while (parts < PARTS && size_of(columns, depth, parts + 1) <= size) parts++;
    return parts;
}

static PyObject *pack(PyObject *module, PyObject *args) {
    unsigned long long weight, packed;
    long size;
    Product given = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "KllKl", &weight, &given.columns, &given.depth, &packed, &size)) return NULL;
    uint16_t *head = (uint16_t *)(uintptr_t)packed;
    given.x = (const float *)(uintptr_t)weight, given.packed = head + HEAD;
    /* Not those of the numbers as they are now: another thread may have changed them since they were counted. */
    given.parts = parts_in(size, given.columns, given.depth);
    *head = (uint16_t)given.parts;
    Py_BEGIN_ALLOW_THREADS
    pack_all(&given);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *multiply(PyObject *module, PyObject *args) {
    unsigned long long x, packed, out;
    Product product = {0};
    long threads;
    (void)module;
    if (!PyArg_ParseTuple(args, "KlKKllll", &x, &product.x_stride, &packed, &out, &product.rows, &product.columns,
                          &product.depth, &threads))
        return NULL;
    const uint16_t *head = (const uint16_t *)(uintptr_t)packed;
    product.x = (const float *)(uintptr_t)x, product.packed = head + HEAD, product.parts = *head;
    product.out = (float *)(uintptr_t)out;
    Py_BEGIN_ALLOW_THREADS
    multiply_all(&product, threads);
    Py_END_ALLOW_THREADS
    if (product.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *num_bytes(PyObject *module, PyObject *args) {
    unsigned long long weight;
    long columns, depth, parts;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kll", &weight, &columns, &depth)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    parts = parts_of((const float *)(uintptr_t)weight, columns * depth);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(size_of(columns, depth, parts));
}

static PyObject *available(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(is_available());
}

static PyMethodDef METHODS[] = {
    {"pack", pack, METH_VARARGS, "pack(weight, columns, depth, packed, bytes of it): addresses, and the shape of the weight."},
    {"multiply", multiply, METH_VARARGS, "multiply(x, stride of its rows, packed, out, rows, columns, depth, threads)"},
    {"num_bytes", num_bytes, METH_VARARGS, "num_bytes(weight, columns, depth): of its packed form."},
    {"available", available, METH_NOARGS, "Whether this processor has AMX."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_split_products", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__split_products(void) { return PyModule_Create(&MODULE); }
